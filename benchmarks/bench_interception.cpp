// What sharding adds to one op on a parameter whose group is gathered already: the same call on a plain and on a
// sharded module, tiny tensors, one rank, the difference of the two.
//
// Each line: name, kind (typed or boxed kernel on the wrapper key), nanoseconds an intercepted op, unit.
#include <fsdp/fsdp.h>

#include <iomanip>
#include <iostream>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace {

constexpr int kNumCalls = 100;
constexpr int kNumRepeats = 500;

double nanoseconds(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kNumCalls; ++i) {
    call();
  }
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / kNumCalls;
}

// The two take turns and the fastest of each counts, so that a disturbance hits neither alone.
double best_difference(const std::function<void()>& plain, const std::function<void()>& sharded) {
  double best_plain = std::numeric_limits<double>::infinity(), best_sharded = best_plain;
  for (int repeat = 0; repeat < kNumRepeats; ++repeat) {
    best_plain = std::min(best_plain, nanoseconds(plain));
    best_sharded = std::min(best_sharded, nanoseconds(sharded));
  }
  return best_sharded - best_plain;
}

struct Case {
  const char* name;
  const char* kind;
  int num_ops;  // intercepted ones in a call
};

class Bench {
 public:
  explicit Bench(fsdp::DeviceMesh mesh) : mesh_(std::move(mesh)) {}

  // `call(module)` runs on a plain module and on a sharded, gathered one.
  template <class Module, class Make, class Call>
  void run(const Case& which, Make make, Call call) const {
    Module plain = make(), sharded = make();
    fsdp::fully_shard(sharded, {.mesh = mesh_}).unshard();
    const double difference = best_difference([&] { call(plain); }, [&] { call(sharded); });
    std::cout << std::left << std::setw(36) << "interception_" + std::string(which.name) << std::setw(8) << which.kind
              << std::right << std::fixed << std::setprecision(1) << std::setw(10) << difference / which.num_ops
              << " ns" << std::endl;
  }

 private:
  fsdp::DeviceMesh mesh_;
};

torch::nn::Linear make_linear(bool bias) { return torch::nn::Linear(torch::nn::LinearOptions(8, 8).bias(bias)); }

void run_typed(const Bench& bench) {
  using torch::nn::Embedding, torch::nn::LayerNorm, torch::nn::Linear;
  const auto matrix = torch::rand({4, 8}), sequence = torch::rand({2, 4, 8});
  const auto tokens = torch::randint(8, {2, 4});
  const auto with_bias = [] { return make_linear(true); };
  const auto without_bias = [] { return make_linear(false); };
  bench.run<Linear>({"linear_2d", "typed", 2}, with_bias, [&](Linear& m) { m(matrix); });               // t, addmm
  bench.run<Linear>({"linear_3d_no_bias", "typed", 2}, without_bias, [&](Linear& m) { m(sequence); });  // t, matmul
  bench.run<LayerNorm>(
      {"layer_norm", "typed", 1}, [] { return LayerNorm(torch::nn::LayerNormOptions({8})); },
      [&](LayerNorm& m) { m(sequence); });
  bench.run<Embedding>(
      {"embedding", "typed", 1}, [] { return Embedding(8, 8); }, [&](Embedding& m) { m(tokens); });
  auto sum = torch::zeros({8, 8});
  bench.run<Linear>({"activation_add_", "typed", 1}, without_bias, [&](Linear& m) { sum.add_(m->weight); });
}

void run_boxed(const Bench& bench) {
  using torch::nn::Linear;
  const auto make = [] { return make_linear(false); };
  const auto matrix = torch::rand({8, 8});
  bench.run<Linear>({"gathered_kron", "boxed", 1}, make, [&](Linear& m) { at::kron(matrix, m->weight); });
  bench.run<Linear>({"shardwise_add_", "boxed", 1}, make, [&](Linear& m) { m->weight.add_(1e-6); });
  bench.run<Linear>({"shardwise_mul_", "boxed", 1}, make, [&](Linear& m) { m->weight.mul_(1.0); });
  bench.run<Linear>({"metadata_is_same_size", "boxed", 1}, make, [&](Linear& m) { m->weight.is_same_size(matrix); });
}

}  // namespace

int main() {
  at::set_num_threads(1);
  const torch::NoGradGuard no_grad;  // autograd's own cost is the same for both
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto group = fsdp::make_process_group(store, /*rank=*/0, /*size=*/1);
  const Bench bench(fsdp::DeviceMesh::from_group(group, at::kCPU));
  run_typed(bench);
  run_boxed(bench);
}
