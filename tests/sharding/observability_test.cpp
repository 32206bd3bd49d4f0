// What profilers and logs show of sharding.
#include <ATen/record_function.h>

#include "support/parity.h"
#include "support/spawn_ranks.h"

namespace fsdp::testing {
namespace {

// The names of all record_function ranges while it lives, of every thread.
class RangeNames {
 public:
  RangeNames()
      : handle_(at::addGlobalCallback(
            at::RecordFunctionCallback([](const at::RecordFunction& range) -> std::unique_ptr<at::ObserverContext> {
              const std::lock_guard lock(mutex());
              names().insert(range.name());
              return nullptr;
            }))) {
    names().clear();
  }
  ~RangeNames() { at::removeCallback(handle_); }
  RangeNames(const RangeNames&) = delete;
  RangeNames& operator=(const RangeNames&) = delete;

  [[nodiscard]] static bool has(const std::string& name) {
    const std::lock_guard lock(mutex());
    return names().contains(name);
  }

 private:
  // A callback is a plain function, so what it writes to is static.
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static std::set<std::string>& names() {
    static std::set<std::string> names;
    return names;
  }
  at::CallbackHandle handle_;
};

TEST(Profiler, SeesGathersReductionsAndInterception) {
  const RangeNames ranges;
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    twins.sharded->loss(twins.part).backward();
    (void)twins.q[0].norm().item<float>();
  });
  EXPECT_TRUE(RangeNames::has("FSDP::all_gather (layers.0.weight and 1 more)"));
  EXPECT_TRUE(RangeNames::has("FSDP::reduce_scatter (layers.4.weight and 1 more)"));
  EXPECT_TRUE(RangeNames::has("FSDP::intercept (aten::norm.Scalar)") ||
              RangeNames::has("FSDP::intercept (aten::linalg_vector_norm)"));
}

RANKS_BODY(logging_rank) {
  init_process_group();
  const auto rank = default_rank_context();
  torch::nn::Sequential net(torch::nn::Linear(4, 4));
  fully_shard(*net->ptr(0), {.mesh = rank.mesh});
  fully_shard(net, {.mesh = rank.mesh});
  net->forward(torch::ones({2, 4})).sum().backward();
}

TEST(Log, TellsWhatWasGrouped) {
  const auto result = spawn_ranks(1, "logging_rank", {.environment = {{"FSDP_LOG", "info"}}});
  EXPECT_ALL_RANKS_OK(result);
  EXPECT_CONTAINS(result.ranks[0].output, "[fsdp rank 0] fully_shard(Linear): weight and 1 more, 80 bytes a rank");
  EXPECT_EQ(result.ranks[0].output.find("gather "), std::string::npos) << "that is for debug";
}

TEST(Log, DebugTellsEachGatherAndReduction) {
  const auto result = spawn_ranks(1, "logging_rank", {.environment = {{"FSDP_LOG", "debug"}}});
  EXPECT_ALL_RANKS_OK(result);
  EXPECT_CONTAINS(result.ranks[0].output, "gather 0.weight and 1 more");
  EXPECT_CONTAINS(result.ranks[0].output, "reduce gradients of 0.weight and 1 more");
}

TEST(Log, UnknownLevelIsRefused) {
  const auto result = spawn_ranks(1, "logging_rank", {.environment = {{"FSDP_LOG", "loud"}}});
  EXPECT_NE(result.ranks[0].status.code, 0);
  EXPECT_CONTAINS(result.ranks[0].output, "FSDP_LOG is 'loud'; known: off, info, debug");
}

}  // namespace
}  // namespace fsdp::testing
