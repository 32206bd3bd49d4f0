// What profilers and logs show of sharding.
#include "support/parity.h"
#include "support/ranges.h"
#include "support/spawn_ranks.h"

namespace fsdp::testing {
namespace {

TEST(Profiler, SeesGathersReductionsAndInterception) {  // behaviours 125
  const Ranges ranges;
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    twins.sharded->loss(twins.part).backward();
    (void)twins.q[0].norm().item<float>();
  });
  EXPECT_TRUE(Ranges::has("FSDP::all_gather (layers.0.weight and 1 more)"));
  EXPECT_TRUE(Ranges::has("FSDP::reduce_scatter (layers.4.weight and 1 more)"));
  EXPECT_TRUE(Ranges::has("FSDP::intercept (aten::norm.Scalar)") ||
              Ranges::has("FSDP::intercept (aten::linalg_vector_norm)"));
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

TEST(Log, DebugTellsEachGatherAndReduction) {  // behaviours 125
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
