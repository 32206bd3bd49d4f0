// Time of one training step (forward, backward, clipping, AdamW) of the GPT of `fsdp train`, plain or sharded.
//
//   bench_step --mode unsharded --dim 64 --num-layers 8 --seq-len 32 --batch-size 4 --steps 20
//
// --mode sharded wants the environment of a launcher. Rank 0 prints {"median_ms": ..., "best_ms": ...} on one line.
#include <fsdp/fsdp.h>

#include <CLI/CLI.hpp>
#include <iostream>

#include "train/trainer.h"

namespace {

using fsdp::train::GPT;
using fsdp::train::GPTOptions;
using fsdp::train::World;

struct Arguments {
  std::string mode = "sharded";
  int64_t batch_size = 4;  // of each rank
  int64_t num_steps = 20;
  int64_t num_warmup_steps = 3;
  GPTOptions model;
};

double step_ms(GPT& model, torch::optim::AdamW& optimizer, const Arguments& arguments) {
  const auto data = torch::randint(arguments.model.vocab_size, {arguments.batch_size, arguments.model.seq_len + 1});
  const auto inputs = data.narrow(1, 0, arguments.model.seq_len);
  const auto targets = data.narrow(1, 1, arguments.model.seq_len);

  const auto start = std::chrono::steady_clock::now();
  const auto loss = torch::nn::functional::cross_entropy(model(inputs).flatten(0, 1), targets.reshape(-1));
  loss.backward();
  torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
  optimizer.step();
  optimizer.zero_grad();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

int run(const Arguments& arguments) {
  at::set_num_threads(1);
  const auto world = arguments.mode == "sharded" ? World::join() : World::alone();
  torch::manual_seed(0);
  GPT model(arguments.model);
  fsdp::train::shard_model(model, world);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  torch::manual_seed(1 + static_cast<uint64_t>(world.rank()));

  std::vector<double> times;
  for (int64_t step = 0; step < arguments.num_warmup_steps + arguments.num_steps; ++step) {
    const double ms = step_ms(model, optimizer, arguments);
    if (step >= arguments.num_warmup_steps) {
      times.push_back(ms);
    }
  }
  std::sort(times.begin(), times.end());
  if (world.is_first()) {
    std::cout << R"({"median_ms": )" << times[times.size() / 2] << R"(, "best_ms": )" << times.front() << "}"
              << std::endl;
  }
  if (!world.is_alone()) {
    fsdp::destroy_process_group();
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Time of one training step"};
  Arguments arguments;
  app.add_option("--mode", arguments.mode)->check(CLI::IsMember({"unsharded", "sharded"}))->capture_default_str();
  app.add_option("--dim", arguments.model.dim)->capture_default_str();
  app.add_option("--num-layers", arguments.model.num_layers)->capture_default_str();
  app.add_option("--seq-len", arguments.model.seq_len)->capture_default_str();
  app.add_option("--batch-size", arguments.batch_size, "of each rank")->check(CLI::PositiveNumber);
  app.add_option("--steps", arguments.num_steps)->check(CLI::PositiveNumber)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return run(arguments);
}
