// Time of one forward and backward of attention over a sequence: on one rank, and spread over all of them by each
// scheme.
//
//   fsdp run --nproc-per-node 2 -- context_parallel --seq-len 8192
//   fsdp run --nproc-per-node 2 -- context_parallel --seq-len 65536 --no-whole --rounds 1
//
// The contenders take turns and each number is the median of the rounds; one thread a rank, and the others sleep while
// rank 0 attends alone. Rank 0 prints one JSON line a contender, with the ratio to one rank's time. "computation" is a
// scheme's kernels alone, on all ranks at once: what it takes above that is collectives, copies and merges.
#include <fsdp/fsdp.h>

#include <CLI/CLI.hpp>
#include <iostream>

#include "attention/attention_kernels.h"
#include "attention/ring_blocks.h"
#include "comm/collectives.h"

namespace {

struct Arguments {
  int64_t seq_len = 8192;
  int64_t batch_size = 1;
  int64_t num_heads = 4;
  int64_t head_dim = 64;
  int64_t rounds = 5;
  bool whole = true;
  bool is_causal = true;
};

struct Inputs {
  at::Tensor q, k, v, grad;
};

Inputs random_inputs(const Arguments& arguments, int64_t num_heads, int64_t num_tokens) {
  const auto random = [&] {  // [B, H, S, D], the heads of a token together, as a projection leaves them
    return torch::randn({arguments.batch_size, num_tokens, num_heads, arguments.head_dim}).transpose(1, 2);
  };
  return {random().requires_grad_(), random().requires_grad_(), random().requires_grad_(), random()};
}

void wait_for_all(const fsdp::DeviceMesh& mesh) {
  for (auto& pending : fsdp::comm::all_reduce({torch::zeros({1})}, mesh.get_group(), "barrier")) pending.wait();
}

double milliseconds(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

struct Contender {
  std::string name;
  bool on_rank_0_only;
  std::function<void()> step;
  std::vector<double> times = {};
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void run_round(std::vector<Contender>& contenders, const fsdp::DeviceMesh& mesh, bool counts) {
  for (auto& contender : contenders) {
    wait_for_all(mesh);
    const double ms = milliseconds([&] {
      if (!contender.on_rank_0_only || mesh.get_local_rank() == 0) contender.step();
      wait_for_all(mesh);
    });
    if (counts) contender.times.push_back(ms);
  }
}

using Attention = std::function<at::Tensor(const Inputs&)>;

std::function<void()> step_of(Inputs inputs, Attention attention) {
  return [inputs = std::move(inputs), attention = std::move(attention)] {
    attention(inputs).backward(inputs.grad);
    for (const auto* leaf : {&inputs.q, &inputs.k, &inputs.v}) leaf->mutable_grad().reset();
  };
}

// The blocks of the ring on keys that are already here.
std::function<void()> ring_blocks_alone(const Inputs& own, const fsdp::DeviceMesh& mesh, const Arguments& arguments,
                                        fsdp::SequenceSplit split) {
  auto call = c10::make_intrusive<fsdp::attention::RingCall>();
  call->sequence = {mesh.get_group(), mesh.get_local_rank(), {arguments.seq_len, mesh.size(), split}};
  call->is_causal = arguments.is_causal;
  return [call, own] {
    const torch::NoGradGuard no_grad;
    for (int64_t step = 0; step < call->num_steps(); ++step) {
      const auto block = block_of_step(*call, step, own.q.size(2));
      if (block.is_empty()) continue;
      const auto rows = [&](const at::Tensor& x) { return x.narrow(2, block.query_begin, block.num_queries); };
      const auto k = own.k.narrow(2, 0, block.num_keys), v = own.v.narrow(2, 0, block.num_keys);
      const auto part = fsdp::attention::attention_with_lse(rows(own.q), k, v, block.is_causal, {});
      std::ignore =
          fsdp::attention::attention_with_lse_backward(rows(own.grad), rows(own.q), k, v, part, block.is_causal, {});
    }
  };
}

std::vector<Contender> make_contenders(const Arguments& arguments, const fsdp::DeviceMesh& mesh) {
  using fsdp::RingRotation;
  using fsdp::SequenceSplit;
  std::vector<Contender> contenders;
  const auto attend = [causal = arguments.is_causal](const Inputs& x) {
    return fsdp::attention::whole_attention(x.q, x.k, x.v, causal, {}, 0.0);
  };
  if (arguments.whole) {
    contenders.push_back(
        {"one rank", true, step_of(random_inputs(arguments, arguments.num_heads, arguments.seq_len), attend)});
  }
  const auto split = arguments.is_causal ? SequenceSplit::kHeadTail : SequenceSplit::kContiguous;
  const auto rank = mesh.get_local_rank();
  const auto num_rows = fsdp::num_local_tokens(arguments.seq_len, rank, mesh.size(), split);
  const auto own = random_inputs(arguments, arguments.num_heads, num_rows);
  const auto num_rows_even = fsdp::num_local_tokens(arguments.seq_len, rank, mesh.size(), SequenceSplit::kContiguous);
  const auto own_even = random_inputs(arguments, arguments.num_heads, num_rows_even);
  if (arguments.num_heads % mesh.size() == 0) {
    contenders.push_back({"ulysses", false, step_of(own_even, [=](const Inputs& x) {
                            return fsdp::ulysses_attention(
                                x.q, x.k, x.v, mesh,
                                {.is_causal = arguments.is_causal, .sequence_length = arguments.seq_len});
                          })});
    const auto by_heads = random_inputs(arguments, arguments.num_heads / mesh.size(), arguments.seq_len);
    contenders.push_back({"ulysses, computation", false, step_of(by_heads, attend)});
  }
  for (const auto rotation : {RingRotation::kAllGather, RingRotation::kAllToAll}) {
    const bool gathers = rotation == RingRotation::kAllGather;
    contenders.push_back(
        {gathers ? "ring by all-gather" : "ring by all-to-all", false, step_of(own, [=](const Inputs& x) {
           return fsdp::ring_attention(x.q, x.k, x.v, mesh,
                                       {.is_causal = arguments.is_causal,
                                        .split = split,
                                        .rotation = rotation,
                                        .sequence_length = arguments.seq_len});
         })});
  }
  contenders.push_back({"ring, computation", false, ring_blocks_alone(own, mesh, arguments, split)});
  return contenders;
}

int run(const Arguments& arguments) {
  at::set_num_threads(1);
  fsdp::init_process_group();
  {
    const auto mesh = fsdp::init_device_mesh(torch::kCPU, {fsdp::world_size()}, {"cp"});
    torch::manual_seed(static_cast<uint64_t>(mesh.get_local_rank()));
    auto contenders = make_contenders(arguments, mesh);
    if (arguments.rounds > 1) run_round(contenders, mesh, false);  // warm
    for (int64_t round = 0; round < arguments.rounds; ++round) run_round(contenders, mesh, true);
    if (mesh.get_local_rank() == 0) {
      const double whole_ms = arguments.whole ? median(contenders.front().times) : 0;
      for (const auto& contender : contenders) {
        const double ms = median(contender.times);
        std::cout << R"({"name": ")" << contender.name << R"(", "median_ms": )" << ms;
        if (arguments.whole) std::cout << R"(, "of_one_rank": )" << ms / whole_ms;
        std::cout << "}" << std::endl;
      }
    }
  }
  fsdp::destroy_process_group();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Attention over a sequence, on one rank and spread over all"};
  Arguments arguments;
  app.add_option("--seq-len", arguments.seq_len)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--batch-size", arguments.batch_size)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--num-heads", arguments.num_heads)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--head-dim", arguments.head_dim)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--rounds", arguments.rounds)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_flag("--whole,!--no-whole", arguments.whole, "time one rank's attention to the whole sequence too");
  app.add_flag("--causal,!--no-causal", arguments.is_causal)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return run(arguments);
}
