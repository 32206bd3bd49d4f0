// Lesson 5: data parallelism, the baseline. Every rank holds the whole MLP and draws its own items; backward averages
// the gradients while it computes them. The model, the optimizer and the loop are those of one process.
//
//   fsdp run --nproc-per-node 2 -- 05_ddp
//   ... --steps 100 --dim 2048      the size of the lesson: 2048 - 4096 - 4096 - 1024
#include <fsdp/fsdp.h>

#include <CLI/CLI.hpp>
#include <iostream>

#include "common/lesson.h"

namespace {

using lesson::require;

struct Options {
  int64_t dim = 64, batch_size = 32, steps = 30;
  double learning_rate = 1e-4;
};

torch::nn::Sequential make_mlp(int64_t dim) {
  namespace nn = torch::nn;
  return nn::Sequential(nn::Linear(dim, 2 * dim), nn::GELU(), nn::Linear(2 * dim, 2 * dim), nn::GELU(),
                        nn::Linear(2 * dim, dim / 2));
}

// Item i is random, but the same wherever it is drawn: [dim] -> its first half.
class RandomItems : public torch::data::datasets::Dataset<RandomItems> {
 public:
  RandomItems(size_t num_items, int64_t dim) : num_items_(num_items), dim_(dim) {}
  torch::data::Example<> get(size_t index) override {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(index);
    const auto x = torch::empty({dim_}).normal_(0, 1, generator);
    return {x, x.narrow(0, 0, dim_ / 2)};
  }
  [[nodiscard]] std::optional<size_t> size() const override { return num_items_; }

 private:
  size_t num_items_;
  int64_t dim_;
};

// One number a parameter; ranks that trained together have the same ones, bit by bit.
at::Tensor fingerprint_of(const torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> norms;
  for (const auto& parameter : module.parameters()) norms.push_back(parameter.norm());
  return torch::stack(norms);
}

at::Tensor of_rank0(const at::Tensor& own) {
  std::vector<at::Tensor> sent{own.clone()};
  fsdp::default_group()->broadcast(sent)->wait();
  return sent.front();
}

void train(const Options& options) {
  torch::manual_seed(fsdp::rank());  // ranks start apart: DistributedDataParallel gives all of them rank 0's start
  auto mlp = make_mlp(options.dim);
  auto ddp = fsdp::DistributedDataParallel(mlp);
  torch::optim::AdamW optimizer(ddp->parameters(), torch::optim::AdamWOptions(options.learning_rate));

  const int64_t num_items = 8 * options.batch_size * fsdp::world_size();
  auto dataset = RandomItems(static_cast<size_t>(num_items), options.dim).map(torch::data::transforms::Stack<>());
  fsdp::DistributedSampler sampler(static_cast<size_t>(num_items));
  auto loader = torch::data::make_data_loader(dataset, sampler, static_cast<size_t>(options.batch_size));

  const auto probe = dataset.get_batch(std::vector<size_t>{0, 1, 2, 3, 4, 5, 6, 7});
  const auto loss_on_probe = [&] {
    const torch::NoGradGuard no_grad;
    return torch::mse_loss(mlp->forward(probe.data), probe.target).item<double>();
  };
  const double first = loss_on_probe();
  int64_t step = 0;
  for (int64_t epoch = 0; step < options.steps; ++epoch) {
    sampler.set_epoch(epoch);  // the loader's copy hears of it: another order, the same on every rank
    for (const auto& batch : *loader) {
      if (step == options.steps) break;
      const auto loss = torch::mse_loss(ddp->forward(batch.data), batch.target);
      loss.backward();  // gradients are complete, and the mean over all ranks, when it returns
      optimizer.step();
      optimizer.zero_grad();
      if (fsdp::rank() == 0 && step % 10 == 0)
        std::cout << "step " << step << "  loss " << loss.item<double>() << std::endl;
      ++step;
    }
  }
  const double last = loss_on_probe();
  require(options.steps < 10 || last < first, "the loss falls");
  const auto own = fingerprint_of(*mlp);
  require(at::equal(own, of_rank0(own)), "all ranks hold the same parameters");
  if (fsdp::rank() == 0)
    std::cout << "lesson 5 done: " << fsdp::world_size() << " rank(s), loss " << first << " -> " << last << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"An MLP, data parallel"};
  Options options;
  app.add_option("--dim", options.dim, "of the input; hidden twice, output half of it")
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  app.add_option("--batch-size", options.batch_size, "of each rank")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--steps", options.steps)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--learning-rate", options.learning_rate)->check(CLI::PositiveNumber)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return lesson::run([&] {
    fsdp::init_process_group();
    train(options);
    fsdp::destroy_process_group();
  });
}
