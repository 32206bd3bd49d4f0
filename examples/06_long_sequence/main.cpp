// Lesson 6: sequences too long for one rank. TinyLLM with causal attention on a mesh (dp, cp): the ranks along cp share
// each sequence, those along dp have sequences of their own. The model calls scaled_dot_product_attention and knows
// nothing of it. Parameters are sharded over dp and gradients averaged over cp too.
//
//   fsdp run --nproc-per-node 2 -- 06_long_sequence --cp 2 --method ulysses
//   fsdp run --nproc-per-node 4 -- 06_long_sequence --cp 2 --method ring
//   ... --seq-len 65536 --steps 1 --depth 1 --dim 256      a long sequence on two cores, minutes
//   ... --dim 4096 --depth 8 --heads 32 --vocab-size 32000 --seq-len 131072     the size of the lesson
#include <fsdp/fsdp.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <iostream>
#include <map>

#include "common/lesson.h"
#include "common/tiny_llm.h"

namespace {

using lesson::require;

struct Options {
  lesson::TinyLLMOptions model;
  int64_t cp = 2, batch_size = 1, seq_len = 256, steps = 5;
  fsdp::ContextParallelMethod method = fsdp::ContextParallelMethod::kUlysses;
};

at::Tensor loss_sum(const at::Tensor& logits, const at::Tensor& targets) {
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten(),
                                              torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
}

void train(const Options& options) {
  require(fsdp::world_size() % options.cp == 0, "the number of ranks is a multiple of --cp");
  const auto mesh = fsdp::init_device_mesh(torch::kCPU, {fsdp::world_size() / options.cp, options.cp}, {"dp", "cp"});
  const auto all = mesh.flatten();
  const fsdp::FullyShardOptions sharding{.mesh = mesh, .dp_mesh_dims = {.shard = {"dp"}, .replicate = {"cp"}}};
  torch::manual_seed(0);
  lesson::TinyLLM model(options.model), plain(options.model);
  {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < model->parameters().size(); ++i) plain->parameters()[i].copy_(model->parameters()[i]);
  }
  for (const auto& layer : *model->layers) fsdp::fully_shard(layer, sharding);
  fsdp::fully_shard(model, sharding);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));

  torch::manual_seed(1 + mesh.get_local_rank("dp"));  // ranks that share a sequence draw the same one
  const auto x = torch::randn({options.batch_size, options.seq_len, options.model.dim});
  const auto targets = torch::randint(options.model.vocab_size, {options.batch_size, options.seq_len});
  double first = 0, last = 0;
  for (int64_t step = 0; step < options.steps; ++step) {
    const auto start = std::chrono::steady_clock::now();
    {
      const auto scope = fsdp::context_parallel(model, mesh["cp"], {x, targets}, {1, 1}, {.method = options.method});
      const auto sum = loss_sum(model(x), targets);
      fsdp::mean_over_ranks(sum, targets.numel(), all).backward();
      last = fsdp::token_mean(sum, targets.numel(), all);
    }
    if (step == 0) first = last;
    optimizer.step();
    optimizer.zero_grad();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    if (fsdp::rank() == 0)
      std::cout << "step " << step << "  loss " << last << "  " << seconds.count() << " s" << std::endl;
  }
  require(x.size(1) == options.seq_len, "the inputs are whole again after the scope");
  require(options.steps == 1 || last < first, "the loss falls");
  if (options.seq_len <= 4096) {  // what one rank alone can compute
    const torch::NoGradGuard no_grad;
    const double whole = fsdp::token_mean(loss_sum(plain(x), targets), targets.numel(), all);
    require(std::abs(whole - first) < 1e-4, "the first loss is that of the whole sequence on one rank");
  }
  if (fsdp::rank() == 0) {
    std::cout << "lesson 6 done: " << options.seq_len << " tokens a sequence, " << options.seq_len / options.cp
              << " of them a rank, " << mesh.size(0) << " x " << options.cp << " ranks, loss " << first << " -> "
              << last << std::endl;
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"TinyLLM with its sequences split over ranks"};
  Options options;
  using Method = fsdp::ContextParallelMethod;
  const std::map<std::string, Method> methods{{"ulysses", Method::kUlysses}, {"ring", Method::kRing}};
  app.add_option("--method", options.method, "ulysses or ring")->transform(CLI::CheckedTransformer(methods));
  for (auto& [name, value] : std::map<std::string, int64_t*>{{"--cp", &options.cp},
                                                             {"--depth", &options.model.depth},
                                                             {"--dim", &options.model.dim},
                                                             {"--heads", &options.model.heads},
                                                             {"--vocab-size", &options.model.vocab_size},
                                                             {"--batch-size", &options.batch_size},
                                                             {"--seq-len", &options.seq_len},
                                                             {"--steps", &options.steps}})
    app.add_option(name, *value)->check(CLI::PositiveNumber)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return lesson::run([&] {
    fsdp::init_process_group();
    train(options);
    fsdp::destroy_process_group();
  });
}
