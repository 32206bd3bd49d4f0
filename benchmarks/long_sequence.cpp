// One Transformer block over a sequence too long to attend to naively, forward and backward, split over the ranks.
//
//   fsdp run --nproc-per-node 1 -- long_sequence --seq-len 65536
//   fsdp run --nproc-per-node 2 -- long_sequence --seq-len 65536 --method ring
//
// All ranks share the sequence. Prints the seconds and, counted at the allocator, the most bytes that tensors held
// beyond what rested before the step: activations, their gradients, and what attention and communication need.
#include <fsdp/fsdp.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <iostream>
#include <map>

#include "common/tiny_llm.h"
#include "support/live_bytes.h"

namespace {

struct Options {
  lesson::TinyLLMOptions model{.dim = 256};
  int64_t seq_len = 65536;
  bool bf16 = false;
  fsdp::ContextParallelOptions scope;
};

void run(Options options) {
  const auto mesh = fsdp::init_device_mesh(torch::kCPU, {fsdp::world_size()}, {"cp"});
  torch::manual_seed(0);
  lesson::Block block(options.model);
  const auto dtype = options.bf16 ? torch::kBFloat16 : torch::kFloat32;
  fsdp::fully_shard(block, {.mesh = mesh, .mp_policy = {.param_dtype = dtype, .reduce_dtype = torch::kFloat32}});
  options.scope.sequence_length = options.seq_len;
  const auto scope = fsdp::context_parallel(block, mesh, {}, {}, options.scope);
  torch::manual_seed(1 + fsdp::rank());
  const auto x = torch::randn({1, scope.position_ids().size(0), options.model.dim}).to(dtype).requires_grad_();

  const fsdp::testing::LiveBytes bytes;
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  auto loss = block(x).to(torch::kFloat32).square().mean();
  const double forward = seconds();
  const auto kept = bytes.current();
  loss.backward();
  const double total = seconds();
  std::cout << "{\"rank\": " << fsdp::rank() << ", \"ranks\": " << fsdp::world_size()
            << ", \"seq_len\": " << options.seq_len << ", \"dim\": " << options.model.dim << ", \"dtype\": \""
            << (options.bf16 ? "bf16" : "fp32") << "\", \"loss\": " << loss.item<double>()
            << ", \"forward_s\": " << forward << ", \"backward_s\": " << total - forward << ", \"kept_bytes\": " << kept
            << ", \"peak_bytes\": " << bytes.peak() << "}" << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"One block over a long sequence, split over the ranks"};
  Options options;
  using Method = fsdp::ContextParallelMethod;
  const std::map<std::string, Method> methods{{"ulysses", Method::kUlysses}, {"ring", Method::kRing}};
  const std::map<std::string, fsdp::RingRotation> rotations{{"allgather", fsdp::RingRotation::kAllGather},
                                                            {"alltoall", fsdp::RingRotation::kAllToAll}};
  app.add_option("--seq-len", options.seq_len)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--dim", options.model.dim)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--heads", options.model.heads)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--method", options.scope.method, "ulysses or ring")->transform(CLI::CheckedTransformer(methods));
  app.add_option("--rotation", options.scope.rotation, "of ring")->transform(CLI::CheckedTransformer(rotations));
  app.add_flag("--bf16", options.bf16, "compute in bf16; fp32 otherwise");
  CLI11_PARSE(app, argc, argv);
  fsdp::init_process_group();
  run(options);
  fsdp::destroy_process_group();
}
