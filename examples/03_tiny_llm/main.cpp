// Lesson 3: mixed precision, and replicas. TinyLLM trains with bf16 gathers and compute, fp32 reductions and fp32
// masters, on a 1-D mesh, or on a 2-D mesh of replicas that are each sharded (HSDP).
//
//   fsdp run --nproc-per-node 2 -- 03_tiny_llm
//   fsdp run --nproc-per-node 4 -- 03_tiny_llm --replicas 2
//   ... --dim 4096 --depth 8 --heads 32 --seq-len 1024 --vocab-size 32000     the size of the lesson
#include <fsdp/fsdp.h>

#include <CLI/CLI.hpp>
#include <iostream>

#include "common/lesson.h"
#include "common/tiny_llm.h"

namespace {

using lesson::require;

struct Options {
  int64_t replicas = 1;
  lesson::TinyLLMOptions model{.depth = 4};
  int64_t batch_size = 4, seq_len = 32, steps = 20;
};

fsdp::DeviceMesh make_mesh(int64_t replicas) {
  const int64_t world_size = fsdp::world_size();
  if (replicas == 1) return fsdp::init_device_mesh(torch::kCPU, {world_size}, {"dp_shard"});
  require(world_size % replicas == 0, "the number of ranks is a multiple of --replicas");
  return fsdp::init_device_mesh(torch::kCPU, {replicas, world_size / replicas}, {"dp_replicate", "dp_shard"});
}

void train(const Options& options) {
  const fsdp::MixedPrecisionPolicy policy{
      .param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat32, .output_dtype = torch::kFloat32};
  const auto mesh = make_mesh(options.replicas);
  torch::manual_seed(0);
  lesson::TinyLLM model(options.model);
  for (const auto& layer : *model->layers) fsdp::fully_shard(layer, {.mesh = mesh, .mp_policy = policy});
  fsdp::fully_shard(model, {.mesh = mesh, .mp_policy = policy});
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));

  torch::manual_seed(1 + fsdp::rank());
  const auto x = torch::randn({options.batch_size, options.seq_len, options.model.dim});
  double first = 0, last = 0;
  for (int64_t step = 0; step < options.steps; ++step) {
    const auto logits = fsdp::call(model, x);  // bf16 inside, fp32 outside
    require(logits.scalar_type() == torch::kFloat32, "call() returns output_dtype");
    const auto loss = logits.square().mean();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    last = loss.item<double>();
    if (step == 0) first = last;
    if (fsdp::rank() == 0 && step % 5 == 0) std::cout << "step " << step << "  loss " << last << std::endl;
  }
  require(last < first, "the loss falls");
  for (const auto& parameter : model->parameters()) {
    require(parameter.scalar_type() == torch::kFloat32, "parameters stay in fp32");
    require(is_shard(fsdp::DTensor(parameter).placements().back()), "parameters are sharded over the last mesh dim");
  }
  const auto stats = fsdp::memory_stats(*model);
  if (fsdp::rank() == 0) {
    std::cout << "lesson 3 done: " << options.replicas << " replica(s) x " << mesh.size(mesh.ndim() - 1)
              << " shards, loss " << first << " -> " << last << ", resting " << stats.parameters.current
              << " bytes of fp32 shards a rank, at most " << stats.gathered.peak << " bytes of bf16 gathered"
              << std::endl;
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"TinyLLM in mixed precision, sharded"};
  Options options;
  app.add_option("--replicas", options.replicas, "rows of the mesh (replicate, shard)")->check(CLI::PositiveNumber);
  app.add_option("--depth", options.model.depth)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--dim", options.model.dim)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--heads", options.model.heads)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--vocab-size", options.model.vocab_size)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--batch-size", options.batch_size, "of each rank")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--seq-len", options.seq_len)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--steps", options.steps)->check(CLI::PositiveNumber)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return lesson::run([&] {
    fsdp::init_process_group();
    train(options);
    fsdp::destroy_process_group();
  });
}
