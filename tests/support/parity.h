#pragma once
// The same net twice on every rank: plain on the joined batch, sharded on the rank's part.
//
//   run_on_ranks(3, [](const RankContext& rank) {
//     Twins twins(rank, net_of<Mlp>());
//     twins.backward();
//     EXPECT_SAME_GRADS(twins, 1e-6);
//   });
//
// Every rank takes the same path through a test: comparisons gather, so none may be skipped on one rank only.
#include <fsdp/fsdp.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "support/nets.h"
#include "support/run_ranks.h"

namespace fsdp::testing {

// What one rank of a test knows of the world.
struct RankContext {
  c10::intrusive_ptr<c10d::Store> store;  // shared by all ranks, for further groups
  ProcessGroup group;
  DeviceMesh mesh;  // 1-D over the group
  [[nodiscard]] int rank() const { return group->getRank(); }
  [[nodiscard]] int size() const { return group->getSize(); }
};

// Ranks as threads of this process; an exception of a rank fails the test.
void run_on_ranks(int size, const std::function<void(const RankContext&)>& body,
                  std::chrono::milliseconds timeout = std::chrono::seconds(30));
// The default group as a RankContext, for bodies that run in processes of their own.
[[nodiscard]] RankContext default_rank_context();

// Runs `body` on 2 and on 3 ranks.
void on_two_and_three(const std::function<void(const RankContext&)>& body);

// A 2-D mesh of the given shape over all ranks, with groups made over rank.store below `name`.
[[nodiscard]] DeviceMesh mesh_2d(const RankContext& rank, int64_t rows, int64_t columns, const std::string& name,
                                 std::vector<std::string> mesh_dim_names = {"replicate", "shard"},
                                 const std::string& backend = "gloo",
                                 std::chrono::milliseconds timeout = std::chrono::seconds(30));

// What an action that must fail says; "" when it does not fail.
template <class Error = c10::Error, class Action>
std::string error_of(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    const auto text = message_of(error);
    return text.empty() ? "(no message)" : text;
  }
  return "";
}

// Float rounding, where nothing amplifies it.
constexpr double kClose = 2e-6;

// Wraps net.units(), bottom up.
void shard_units(TestNet& net, const DeviceMesh& mesh, std::optional<bool> reshard_after_forward = std::nullopt);
void shard_units(TestNet& net, const FullyShardOptions& options);

// The values a tensor stands for, on every rank. Collective when it is sharded.
[[nodiscard]] at::Tensor whole(const at::Tensor& tensor);
// Largest difference, relative to the reference where that is above one. Infinite when only one is defined.
[[nodiscard]] double difference(const at::Tensor& reference, const at::Tensor& actual);
[[nodiscard]] double difference(const std::vector<at::Tensor>& reference, const std::vector<at::Tensor>& actual);
// Of this rank's part only, without communication; all of `actual` must be sharded, or undefined as the reference is.
[[nodiscard]] double own_difference(const std::vector<at::Tensor>& reference, const std::vector<at::Tensor>& actual);
[[nodiscard]] std::vector<at::Tensor> grads(const std::vector<at::Tensor>& parameters);
// The mean over ranks of a plain scalar. Collective.
[[nodiscard]] double mean_over_ranks(const at::Tensor& scalar, const ProcessGroup& group);

class Twins {
 public:
  struct Options {
    int64_t rows_per_rank = 2;
    at::ScalarType dtype = at::kFloat;
    std::optional<bool> reshard_after_forward = std::nullopt;
    bool shard = true;  // false: the test wraps `sharded` itself
  };
  Twins(RankContext context, const NetFactory& make) : Twins(std::move(context), make, Options{}) {}
  Twins(RankContext context, const NetFactory& make, const Options& options);

  // body(net, x) for the plain net with the joined batch, then for the sharded one with this rank's part.
  template <class Body>
  void both(Body&& body) {
    body(*plain, joined);
    body(*sharded, part);
  }
  // loss().backward() on both.
  void backward();
  void zero_grad();
  void next_batch();  // other values, same shapes

  [[nodiscard]] double grad_difference() const;
  [[nodiscard]] double parameter_difference() const;
  [[nodiscard]] MemoryStats stats() const { return memory_stats(*sharded); }

  template <class Net>
  [[nodiscard]] static Net& as(TestNet& net) {
    return dynamic_cast<Net&>(net);
  }

  RankContext rank;
  std::shared_ptr<TestNet> plain, sharded;
  at::Tensor joined, part;
  std::vector<at::Tensor> p, q;  // parameters of plain and of sharded, in the same order

 private:
  Options options_;
  uint64_t num_batches_ = 0;
};

using OptimizerFactory = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

struct NamedOptimizer {
  std::string name;
  OptimizerFactory make;
};
[[nodiscard]] OptimizerFactory sgd(double learning_rate = 0.05);
// Every optimizer that the library promises to drive, with momentum, decay and the like switched on.
[[nodiscard]] std::vector<NamedOptimizer> all_optimizers();

struct TrainOptions {
  int num_steps = 10;
  double tolerance = 1e-5;
  bool compare_parameters = true;
  OptimizerFactory optimizer = sgd();
  std::function<void(TestNet&, int step)> before_step = nullptr;        // on both nets
  std::function<void(TestNet&, const at::Tensor&)> backward = nullptr;  // default: net.loss(x).backward()
  std::function<void(TestNet&)> after_backward = nullptr;               // on both nets, before they are compared
  std::function<void(const std::vector<at::Tensor>&)> before_update = nullptr;  // e.g. clipping
};
// Trains both and compares losses, gradients and parameters after each step.
void expect_same_training(Twins& twins, const TrainOptions& options = {});

}  // namespace fsdp::testing

#define EXPECT_CONTAINS(text, part) EXPECT_NE(std::string(text).find(part), std::string::npos) << "got: " << (text)
#define EXPECT_SAME_GRADS(twins, tolerance) EXPECT_LE((twins).grad_difference(), tolerance)
#define EXPECT_SAME_PARAMETERS(twins, tolerance) EXPECT_LE((twins).parameter_difference(), tolerance)
