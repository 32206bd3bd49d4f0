// The learnt schedule and the layout of rows, without any process group.
#include "sharding/schedule.h"

#include <gtest/gtest.h>

#include "sharding/flat_layout.h"

namespace fsdp::sharding {
namespace {

using Kind = Schedule::Kind;

// Gathers `ids` in order; true when every one was predicted.
bool run_pass(Schedule& schedule, const std::vector<int>& ids) {
  bool all_predicted = true;
  for (const int id : ids) {
    schedule.touched(id, /*with_grad=*/true);
    all_predicted = schedule.expects(id) && all_predicted;
    schedule.gathered(id);
  }
  return all_predicted;
}

TEST(Schedule, PredictsTheSecondIterationFromTheFirst) {
  Schedule schedule;
  schedule.begin_pass(Kind::kForward);
  EXPECT_FALSE(run_pass(schedule, {0, 1, 2, 3}));
  schedule.begin_pass(Kind::kBackward);
  EXPECT_FALSE(run_pass(schedule, {2, 1}));
  schedule.begin_pass(Kind::kForward);
  EXPECT_EQ(schedule.next(), 0);
  EXPECT_TRUE(run_pass(schedule, {0, 1, 2, 3}));
  EXPECT_EQ(schedule.next(), std::nullopt);
  schedule.begin_pass(Kind::kBackward);
  EXPECT_EQ(schedule.next(), 2);
  EXPECT_TRUE(run_pass(schedule, {2, 1}));
}

TEST(Schedule, FindsItsPlaceAgainAfterADeviation) {
  Schedule schedule;
  for (int iteration = 0; iteration < 2; ++iteration) {
    schedule.begin_pass(Kind::kForward);
    run_pass(schedule, {0, 1, 2, 3});
    schedule.begin_pass(Kind::kBackward);
  }
  schedule.begin_pass(Kind::kForward);
  EXPECT_TRUE(run_pass(schedule, {0, 1}));
  EXPECT_FALSE(run_pass(schedule, {3})) << "2 was skipped";
  schedule.begin_pass(Kind::kBackward);
  schedule.begin_pass(Kind::kForward);
  EXPECT_TRUE(run_pass(schedule, {0, 1, 3})) << "the last iteration counts";
}

TEST(Schedule, EvaluationPredictsEachPassFromTheOneBefore) {
  Schedule schedule;
  schedule.begin_pass(Kind::kForward);
  run_pass(schedule, {0, 1, 2});
  schedule.touched(0, /*with_grad=*/false);  // the resident root: evaluation goes round again
  EXPECT_EQ(schedule.next(), 0);
  EXPECT_FALSE(run_pass(schedule, {1}));
  EXPECT_TRUE(run_pass(schedule, {2}));
  schedule.touched(0, /*with_grad=*/false);
  EXPECT_TRUE(run_pass(schedule, {1, 2}));
}

TEST(Schedule, TheFirstTrainingIterationIsNotPredictedFromItself) {
  Schedule schedule;
  for (int iteration = 0; iteration < 2; ++iteration) {
    schedule.begin_pass(Kind::kForward);
    EXPECT_EQ(run_pass(schedule, {0, 1, 2}), iteration == 1);
    schedule.touched(0, /*with_grad=*/true);  // the model is applied a second time
    EXPECT_EQ(run_pass(schedule, {1, 2}), iteration == 1);
    schedule.begin_pass(Kind::kBackward);
  }
}

TEST(Schedule, KeepsTwoBackwardsOfAnIterationApart) {
  Schedule schedule;
  for (int iteration = 0; iteration < 2; ++iteration) {
    schedule.begin_pass(Kind::kForward);
    run_pass(schedule, {0, 1, 2});
    schedule.begin_pass(Kind::kBackward);
    EXPECT_EQ(run_pass(schedule, {2, 1}), iteration == 1);
    schedule.begin_pass(Kind::kBackward);
    EXPECT_EQ(run_pass(schedule, {2, 0}), iteration == 1);
  }
}

TEST(FlatLayout, GivesEveryRankTheSameRowWhateverDivides) {
  const auto layout = make_layout({{{5, 3}, at::kFloat}, {{1, 3}, at::kFloat}}, 2);
  EXPECT_EQ(layout.slots[0].chunk, 3);
  EXPECT_EQ(layout.slots[0].shard_numel(), 9);
  EXPECT_EQ(layout.slots[1].shard_numel(), 3);
  EXPECT_EQ(layout.slots[0].rows_of(1).begin, 3);
  EXPECT_EQ(layout.slots[0].rows_of(1).end, 5);
  EXPECT_EQ(layout.slots[1].shard_sizes(1), (std::vector<int64_t>{0, 3})) << "an empty shard";
  EXPECT_EQ(layout.shard_bytes, 12 * 4) << "no gaps";
}

TEST(FlatLayout, KeepsEachDtypeTogetherAndAligned) {
  const auto layout = make_layout({{{3}, at::kDouble}, {{3}, at::kFloat}, {{2}, at::kDouble}}, 2);
  const auto& slots = layout.slots;
  EXPECT_GT(slots[1].shard_offset, slots[0].shard_offset);
  EXPECT_GT(slots[1].shard_offset, slots[2].shard_offset) << "doubles first";
  for (const auto& slot : slots) {
    EXPECT_EQ(slot.shard_offset % slot.itemsize(), 0);
    EXPECT_EQ(slot.gathered_offset % 64, 0);
  }
}

TEST(FlatLayout, FollowsTorchChunk) {
  const auto rows = [](int64_t n, int64_t num_ranks) {
    const auto layout = make_layout({{{n}, at::kFloat}}, num_ranks);
    std::vector<int64_t> sizes;
    for (int64_t r = 0; r < num_ranks; ++r) sizes.push_back(layout.slots[0].rows_of(r).size());
    return sizes;
  };
  EXPECT_EQ(rows(5, 4), (std::vector<int64_t>{2, 2, 1, 0}));
  EXPECT_EQ(rows(10, 4), (std::vector<int64_t>{3, 3, 3, 1}));
  EXPECT_EQ(rows(1, 4), (std::vector<int64_t>{1, 0, 0, 0}));
  EXPECT_EQ(rows(10, 8), (std::vector<int64_t>{2, 2, 2, 2, 2, 0, 0, 0}));
}

}  // namespace
}  // namespace fsdp::sharding
