// Lesson 2: the schedule in your hands. The same model and loop as in lesson 1, trained twice: gathers as the library
// learns them, and as lists tell it, two layers ahead, with an early unshard. Losses are equal; the order of gathers is
// not the same, and is what the lists say.
//
//   fsdp run --nproc-per-node 2 -- 02_explicit_prefetch
#include <fsdp/fsdp.h>

#include <iostream>

#include "common/lesson.h"
#include "common/transformer.h"

namespace {

using lesson::require;

constexpr int64_t kBatchSize = 4;  // of each rank
constexpr int kNumSteps = 5;
constexpr int64_t kNumAhead = 2;

struct Trainer {
  lesson::Transformer model;
  torch::optim::Adam optimizer;
  int64_t bytes_in_flight = 0;  // at most, in the last forward

  explicit Trainer(const lesson::Transformer& m) : model(m), optimizer(m->parameters(), /*lr=*/1e-2) {}

  double step(const at::Tensor& tokens) {
    fsdp::reset_peak_memory_stats(*model);
    const auto loss = model(tokens).sum();
    bytes_in_flight = fsdp::memory_stats(*model).buffers.peak;
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    return loss.item<double>();
  }
};

lesson::Transformer make_sharded(const lesson::ModelArgs& args, const fsdp::DeviceMesh& mesh) {
  torch::manual_seed(0);
  lesson::Transformer model(args);
  for (const auto& layer : *model->layers) fsdp::fully_shard(layer, {.mesh = mesh});
  fsdp::fully_shard(model, {.mesh = mesh});
  return model;
}

// Layer i starts the gathers of i + 1, i + 2 in forward, and of i - 1, i - 2 in backward.
void set_prefetch(const lesson::Transformer& model) {
  std::vector<fsdp::FSDPModule> layers;
  for (const auto& layer : *model->layers) layers.push_back(fsdp::FSDPModule::of(*layer));
  const auto num_layers = static_cast<int64_t>(layers.size());
  for (int64_t i = 0; i < num_layers; ++i) {
    std::vector<fsdp::FSDPModule> ahead, behind;
    for (int64_t k = 1; k <= kNumAhead; ++k) {
      if (i + k < num_layers) ahead.push_back(layers[i + k]);
      if (i - k >= 0) behind.push_back(layers[i - k]);
    }
    layers[i].set_modules_to_forward_prefetch(ahead);
    layers[i].set_modules_to_backward_prefetch(behind);
  }
}

void teach() {
  fsdp::init_process_group();
  const auto mesh = fsdp::init_device_mesh(torch::kCPU, {fsdp::world_size()}, {"dp"});
  const lesson::ModelArgs args{.num_layers = 4, .dropout = 0.0};

  Trainer implicit(make_sharded(args, mesh));
  Trainer told_by_lists(make_sharded(args, mesh));
  set_prefetch(told_by_lists.model);

  torch::manual_seed(1 + fsdp::rank());  // each rank has its own batches
  for (int step = 0; step < kNumSteps; ++step) {
    const auto before = fsdp::memory_stats(*told_by_lists.model).num_all_gathers;
    // The root's gather runs while the batch is made.
    auto handle = fsdp::FSDPModule::of(*told_by_lists.model).unshard(/*async_op=*/true);
    const auto tokens = torch::randint(args.vocab_size, {kBatchSize, args.max_seq_len});
    handle.wait();  // the first use would wait too
    const double told = told_by_lists.step(tokens);
    const double learnt = implicit.step(tokens);
    const auto num_gathers = fsdp::memory_stats(*told_by_lists.model).num_all_gathers - before;
    if (fsdp::rank() == 0)
      std::cout << "step " << step << "  learnt order: " << learnt << "  explicit lists: " << told
                << "  gathers: " << num_gathers << std::endl;
    require(std::abs(told - learnt) <= 1e-4 * std::max(1.0, std::abs(learnt)), "prefetching changes no value");
    require(num_gathers <= 2 * (args.num_layers + 1), "no group is gathered more than twice in a step");
  }
  require(fsdp::world_size() == 1 || told_by_lists.bytes_in_flight > implicit.bytes_in_flight,
          "looking further ahead costs memory");
  if (fsdp::rank() == 0) {
    std::cout << "lesson 2 done: " << kNumAhead << " layers ahead over " << fsdp::world_size()
              << " ranks, bytes in flight at most " << told_by_lists.bytes_in_flight << ", learnt order "
              << implicit.bytes_in_flight << std::endl;
  }
  fsdp::destroy_process_group();
}

}  // namespace

int main() { return lesson::run(teach); }
