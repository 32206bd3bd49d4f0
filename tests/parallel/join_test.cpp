// Unequal numbers of batches: as one process that takes in each step the batches that are there.
#include <fsdp/join.h>

#include "support/parity.h"

namespace fsdp::testing {
namespace {

constexpr int kNumRanks = 3;
constexpr std::array<int64_t, kNumRanks> kNumBatches{1, 2, 4};
constexpr int64_t kRows = 2;

int64_t num_ranks_with_batch(int64_t step) {
  return std::count_if(kNumBatches.begin(), kNumBatches.end(), [&](int64_t n) { return step < n; });
}

// The plain net: the batches of this step, each with its own mean, divided by `divisor`.
void plain_backward(TestNet& net, const at::Tensor& joined, int64_t step, int64_t divisor) {
  for (int64_t rank = 0; rank < kNumRanks; ++rank) {
    if (step >= kNumBatches[rank]) continue;
    (net.loss(joined.narrow(0, rank * kRows, kRows)) / divisor).backward();
  }
}

void expect_as_one_process(const RankContext& rank, const DeviceMesh& mesh, const JoinOptions& options) {
  Twins twins(rank, net_of<Mlp>(), {.rows_per_rank = kRows, .shard = false});
  shard_units(*twins.sharded, mesh);
  const auto optimizer_p = sgd()(twins.p), optimizer_q = sgd()(twins.q);
  Join join(mesh, options);
  int64_t step = 0;
  for (; join.next(step < kNumBatches[rank.rank()]); ++step) {
    const auto num_active = num_ranks_with_batch(step);
    EXPECT_EQ(join.num_ranks_with_data(), num_active);
    plain_backward(*twins.plain, twins.joined, step, options.divide_by_initial_world_size ? kNumRanks : num_active);
    (twins.sharded->loss(twins.part) * join.weight()).backward();
    EXPECT_SAME_GRADS(twins, kClose);
    optimizer_p->step();
    optimizer_q->step();
    twins.zero_grad();
    twins.next_batch();
  }
  EXPECT_EQ(step, 4);
  EXPECT_SAME_PARAMETERS(twins, kClose);
}

TEST(Join, UnequalBatchesAsOneProcess) {
  for (const bool by_world_size : {false, true}) {
    run_on_ranks(kNumRanks, [&](const RankContext& rank) {
      expect_as_one_process(rank, rank.mesh, {.divide_by_initial_world_size = by_world_size});
    });
  }
}

TEST(Join, OverBothDimsOfAMesh) {
  run_on_ranks(kNumRanks,
               [](const RankContext& rank) { expect_as_one_process(rank, mesh_2d(rank, kNumRanks, 1, "rows"), {}); });
  run_on_ranks(4, [](const RankContext& rank) {  // one rank alone has data: both dims must hear of it
    Join join(mesh_2d(rank, 2, 2, "square"));
    ASSERT_TRUE(join.next(rank.rank() == 3));
    EXPECT_EQ(join.num_ranks_with_data(), 1);
    EXPECT_EQ(join.weight(), rank.rank() == 3 ? 4.0 : 0.0);
    EXPECT_FALSE(join.next(false));
  });
}

TEST(Join, ALoneRank) {
  run_on_ranks(1, [](const RankContext& rank) {
    Join join(rank.mesh);
    EXPECT_TRUE(join.next(true));
    EXPECT_EQ(join.weight(), 1.0);
    EXPECT_FALSE(join.next(false));
  });
}

TEST(Join, EarlyTerminationRaisesOnEveryRank) {
  run_on_ranks(2, [](const RankContext& rank) {
    Join join(rank.mesh, {.throw_on_early_termination = true});
    EXPECT_TRUE(join.next(true));
    const auto message = error_of([&] { std::ignore = join.next(rank.rank() == 1); });
    EXPECT_CONTAINS(message, "1 of 2 ranks ran out of data");
    EXPECT_CONTAINS(message, rank.rank() == 1 ? "not this one" : "among them this one");
  });
}

TEST(Join, AfterTheEndAndWithoutMesh) {
  run_on_ranks(2, [](const RankContext& rank) {
    Join join(rank.mesh);
    EXPECT_FALSE(join.next(false));
    EXPECT_CONTAINS(error_of([&] { std::ignore = join.next(true); }), "after it returned false");
  });
  EXPECT_CONTAINS(error_of<c10::ValueError>([] { const Join join{DeviceMesh()}; }), "mesh is undefined");
}

TEST(Join, ARankThatDoesNotComeIsNamed) {
  run_on_ranks(
      2,
      [](const RankContext& rank) {
        if (rank.rank() == 1) return;
        Join join(rank.mesh);
        const auto message = error_of<c10::DistError>([&] { std::ignore = join.next(true); });
        EXPECT_CONTAINS(message, "counts the ranks that have data");
        EXPECT_CONTAINS(message, "ranks [1] did not come");
      },
      std::chrono::seconds(4));
}

}  // namespace
}  // namespace fsdp::testing
