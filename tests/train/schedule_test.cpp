#include "train/schedule.h"

#include <gtest/gtest.h>

#include "support/errors.h"

namespace fsdp::train {
namespace {

TEST(Schedule, WarmsUpThenFollowsHalfACosine) {
  const ScheduleOptions options{.peak = 1.0, .min_factor = 0.1, .warmup_steps = 4, .num_steps = 12};
  EXPECT_DOUBLE_EQ(learning_rate(options, 0), 0.25);
  EXPECT_DOUBLE_EQ(learning_rate(options, 1), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(options, 3), 1.0);
  EXPECT_NEAR(learning_rate(options, 7), 0.55, 1e-12);  // half way down
  EXPECT_NEAR(learning_rate(options, 11), 0.1, 1e-12);
  EXPECT_NEAR(learning_rate(options, 20), 0.1, 1e-12);  // past the end it stays
  for (int64_t step = 4; step < 11; ++step) {
    EXPECT_GT(learning_rate(options, step), learning_rate(options, step + 1));
  }
}

TEST(Schedule, WorksWithoutWarmUpAndWithNothingElse) {
  EXPECT_NEAR(learning_rate({.peak = 2.0, .min_factor = 0.0, .warmup_steps = 0, .num_steps = 2}, 0), 1.0, 1e-12);
  EXPECT_NEAR(learning_rate({.peak = 2.0, .min_factor = 0.0, .warmup_steps = 0, .num_steps = 2}, 1), 0.0, 1e-12);
  EXPECT_DOUBLE_EQ(learning_rate({.peak = 2.0, .min_factor = 0.1, .warmup_steps = 5, .num_steps = 5}, 4), 2.0);
}

TEST(Schedule, NamesImpossibleValues) {
  EXPECT_ERROR((ScheduleOptions{.num_steps = 0}.validate()), c10::ValueError, "steps must be at least 1, but is 0");
  EXPECT_ERROR((ScheduleOptions{.peak = 0.0}.validate()), c10::ValueError, "lr must be positive");
  EXPECT_ERROR((ScheduleOptions{.min_factor = 1.5}.validate()), c10::ValueError, "min_lr_factor must lie in [0, 1]");
  EXPECT_ERROR((ScheduleOptions{.warmup_steps = 11, .num_steps = 10}.validate()), c10::ValueError,
               "warmup_steps must lie in [0, steps = 10], but is 11");
}

}  // namespace
}  // namespace fsdp::train
