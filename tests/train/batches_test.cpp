#include "train/batches.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>

#include "support/errors.h"

namespace fsdp::train {
namespace {

// Byte i is i, so that a window tells where it was cut.
at::Tensor counting_bytes(int64_t num_bytes) { return at::arange(num_bytes).to(at::kByte); }

TEST(BatchSampler, TargetsAreTheNextBytes) {
  const BatchSampler sampler(counting_bytes(200), /*seq_len=*/8, /*seed=*/1);
  const auto batch = sampler.rows(/*step=*/3, /*first_row=*/0, /*num_rows=*/5);
  EXPECT_EQ(batch.inputs.sizes(), (std::vector<int64_t>{5, 8}));
  EXPECT_EQ(batch.inputs.scalar_type(), at::kLong);
  EXPECT_TRUE(at::equal(batch.inputs + 1, batch.targets));
}

TEST(BatchSampler, JoinedBatchIsTheSameAtEveryWorldSize) {
  const BatchSampler sampler(counting_bytes(250), 8, 42);
  for (int64_t step = 0; step < 3; ++step) {
    const auto whole = sampler.rows(step, 0, 12);
    for (const int64_t world_size : {2, 3, 4}) {
      const auto num_rows = 12 / world_size;
      std::vector<at::Tensor> inputs, targets;
      for (int64_t rank = 0; rank < world_size; ++rank) {
        const auto part = sampler.rows(step, rank * num_rows, num_rows);
        inputs.push_back(part.inputs);
        targets.push_back(part.targets);
      }
      EXPECT_TRUE(at::equal(at::cat(inputs), whole.inputs)) << world_size << " ranks, step " << step;
      EXPECT_TRUE(at::equal(at::cat(targets), whole.targets)) << world_size << " ranks, step " << step;
    }
  }
}

TEST(BatchSampler, DependsOnSeedAndStep) {
  const auto tokens = counting_bytes(250);
  const BatchSampler one(tokens, 8, 1), same(tokens, 8, 1), other(tokens, 8, 2);
  EXPECT_TRUE(at::equal(one.rows(5, 0, 16).inputs, same.rows(5, 0, 16).inputs));
  EXPECT_FALSE(at::equal(one.rows(5, 0, 16).inputs, other.rows(5, 0, 16).inputs));
  EXPECT_FALSE(at::equal(one.rows(5, 0, 16).inputs, one.rows(6, 0, 16).inputs));
}

TEST(BatchSampler, ReachesFirstAndLastWindow) {
  const BatchSampler sampler(counting_bytes(12), /*seq_len=*/8, /*seed=*/7);
  std::set<int64_t> offsets;
  for (int64_t step = 0; step < 64; ++step) {
    offsets.insert(sampler.offset(step, 0));
  }
  EXPECT_EQ(offsets, (std::set<int64_t>{0, 1, 2, 3}));  // 3 + 8 inputs, and one byte after
}

TEST(BatchSampler, RefusesTextWithoutASequence) {
  EXPECT_ERROR(BatchSampler(counting_bytes(8), 8, 1), c10::ValueError, "a text of 8 bytes holds no sequence of 8");
}

TEST(FixedWindows, SpreadOverTheTextWithoutOverlap) {
  const FixedWindows windows(counting_bytes(101), /*seq_len=*/10, /*max_windows=*/4);
  ASSERT_EQ(windows.size(), 4);
  const auto starts = windows.rows(0, 4).inputs.select(1, 0);
  EXPECT_TRUE(at::equal(starts, at::tensor({0, 30, 60, 90}, at::kLong)));
  EXPECT_TRUE(at::equal(windows.rows(0, 4).inputs + 1, windows.rows(0, 4).targets));
}

TEST(FixedWindows, AreAsManyAsFit) {
  EXPECT_EQ(FixedWindows(counting_bytes(101), 10, 1000).size(), 10);
  EXPECT_EQ(FixedWindows(counting_bytes(100), 10, 1000).size(), 9);  // the last needs a byte after it
  EXPECT_EQ(FixedWindows(counting_bytes(11), 10, 1000).size(), 1);
  EXPECT_ERROR(FixedWindows(counting_bytes(10), 10, 1000), c10::ValueError, "holds no window of 10 bytes");
  EXPECT_ERROR(FixedWindows(counting_bytes(11), 10, 0), c10::ValueError, "max_windows must be at least 1");
}

TEST(FixedWindows, RepeatTheLastPastTheEnd) {
  const FixedWindows windows(counting_bytes(101), 10, 4);
  const auto rows = windows.rows(3, 3).inputs;
  EXPECT_TRUE(at::equal(rows[0], rows[1]));
  EXPECT_TRUE(at::equal(rows[0], rows[2]));
}

}  // namespace
}  // namespace fsdp::train
