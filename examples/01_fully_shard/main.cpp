// Lesson 1: one call shards a model. The same model and the same loop run twice, on one process and sharded over all
// ranks; the two differ in the lines marked (*) and in nothing else.
//
//   fsdp run --nproc-per-node 2 -- 01_fully_shard
#include <fsdp/fsdp.h>

#include <iomanip>
#include <iostream>

#include "common/lesson.h"
#include "common/transformer.h"

namespace {

using lesson::require;

constexpr int64_t kBatchSize = 4;  // of each rank
constexpr int kNumSteps = 5;

// Dropout is off: the two runs below draw different masks.
lesson::Transformer make_model(const lesson::ModelArgs& args) {
  torch::manual_seed(0);
  return lesson::Transformer(args);
}

// Random tokens for all ranks; a rank takes its part, the one-process run takes everything.
at::Tensor make_batch(const lesson::ModelArgs& args, int64_t num_rows) {
  return torch::randint(args.vocab_size, {num_rows, args.max_seq_len});
}

at::Tensor own_rows(const at::Tensor& joined) { return joined.narrow(0, fsdp::rank() * kBatchSize, kBatchSize); }

double average_over_ranks(double value) {
  std::vector<at::Tensor> values{torch::tensor(value, torch::kDouble)};
  fsdp::default_group()->allreduce(values)->wait();
  return values[0].item<double>() / fsdp::world_size();
}

// The training loop, ignorant of sharding: step, clip, print.
struct Trainer {
  lesson::Transformer model;
  torch::optim::Adam optimizer;

  explicit Trainer(const lesson::Transformer& m) : model(m), optimizer(m->parameters(), /*lr=*/1e-2) {}

  double step(const at::Tensor& tokens) {
    const auto loss = model(tokens).sum() / (tokens.size(0) / kBatchSize);  // per kBatchSize rows, however many came
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), /*max_norm=*/1.0);
    optimizer.step();
    optimizer.zero_grad();
    return loss.item<double>();
  }
};

// What fully_shard made of the model.
void inspect(const lesson::Transformer& model, const lesson::ModelArgs& args) {
  const auto tree = fsdp::describe(*model);
  if (fsdp::rank() == 0) {
    std::cout << tree << std::endl;
  }
  require(model->as<lesson::TransformerImpl>() != nullptr, "the model is still a Transformer");
  require(fsdp::is_fsdp(*model), "the model is now an FSDPModule too");
  require(tree.find("FSDPTransformer(") != std::string::npos, "the printed tree starts with FSDPTransformer");
  require(tree.find("FSDPTransformerBlock") != std::string::npos, "the printed tree holds FSDPTransformerBlocks");
  for (const auto& layer : *model->layers) {
    require(fsdp::is_fsdp(*layer), "each layer is an FSDPModule");
  }
  require(static_cast<int64_t>(model->layers->size()) == args.num_layers, "no layer was added or lost");

  int64_t num_local = 0, num_global = 0;
  for (const auto& parameter : model->parameters()) {
    require(fsdp::DTensor::is(parameter), "each parameter is a DTensor");
    const fsdp::DTensor dtensor(parameter);
    require(dtensor.placements() == fsdp::Placements{fsdp::Shard{0}}, "each parameter is placed as Shard(0)");
    num_local += dtensor.to_local().numel();
    num_global += parameter.numel();  // sizes() is the whole tensor's
  }
  std::cout << "rank " << fsdp::rank() << " holds " << num_local << " of " << num_global << " parameters" << std::endl;
}

void teach() {
  fsdp::init_process_group();  // (*) RANK, WORLD_SIZE, ... as `fsdp run` or torchrun set them
  const auto mesh = fsdp::init_device_mesh(torch::kCPU, {fsdp::world_size()}, {"dp"});  // (*)
  const lesson::ModelArgs args{.num_layers = 3, .dropout = 0.0};

  Trainer alone(make_model(args));

  auto model = make_model(args);
  for (const auto& layer : *model->layers) fsdp::fully_shard(layer, {.mesh = mesh});  // (*) bottom up
  fsdp::fully_shard(model, {.mesh = mesh});                                           // (*)
  inspect(model, args);
  Trainer sharded(model);  // the optimizer comes after wrapping, so that its state is sharded too

  for (int step = 0; step < kNumSteps; ++step) {
    const auto joined = make_batch(args, kBatchSize * fsdp::world_size());
    const double expected = alone.step(joined);
    const double loss = average_over_ranks(sharded.step(own_rows(joined)));
    if (fsdp::rank() == 0) {
      std::cout << "step " << step << std::fixed << std::setprecision(5) << "  one process: " << expected
                << "  sharded: " << loss << std::endl;
    }
    require(std::abs(loss - expected) < 1e-3 * std::max(1.0, std::abs(expected)), "both losses agree");
  }
  for (const auto& item : sharded.optimizer.state()) {
    const auto& state = static_cast<const torch::optim::AdamParamState&>(*item.second);
    require(fsdp::DTensor::is(state.exp_avg()), "the optimizer's state is sharded like its parameter");
  }
  if (fsdp::rank() == 0) {
    std::cout << "lesson 1 done: sharded over " << fsdp::world_size() << " ranks, same losses as one process"
              << std::endl;
  }
  fsdp::destroy_process_group();
}

}  // namespace

int main() { return lesson::run(teach); }
