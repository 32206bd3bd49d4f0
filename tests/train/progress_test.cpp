#include "train/progress.h"

#include <gtest/gtest.h>

#include <sstream>

namespace fsdp::train {
namespace {

StepReport report_of(int64_t step, int64_t num_steps) {
  StepReport report{.step = step, .num_steps = num_steps, .loss = 2.5312, .grad_norm = 0.81234, .lr = 3e-3};
  report.tokens_per_second = 12345.4;
  report.resident_bytes = int64_t{333} << 20;
  report.seconds_left = 75.2;
  report.is_last = step == num_steps;
  return report;
}

TEST(Progress, FormatsAStep) {
  auto report = report_of(20, 1000);
  EXPECT_EQ(format_step(report),
            "step:   20/1000  loss:  2.53120  grad_norm:  0.8123  lr: 3.00e-03  memory: 0.33GiB  tokens/s: 12,345"
            "  eta: 0:01:15");
  report.sharded_bytes = int64_t{20} << 20;
  EXPECT_NE(format_step(report).find("memory: 0.33GiB (fsdp 20.00 MiB)  tokens/s"), std::string::npos);
}

TEST(Progress, FormatsNumbers) {
  EXPECT_EQ(with_commas(0), "0");
  EXPECT_EQ(with_commas(999), "999");
  EXPECT_EQ(with_commas(1000), "1,000");
  EXPECT_EQ(with_commas(-1234567), "-1,234,567");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1741211), "1.66 MiB");
  EXPECT_EQ(format_duration(59.4), "0:00:59");
  EXPECT_EQ(format_duration(3600 * 30 + 61), "30:01:01");
  EXPECT_EQ(format_duration(-3), "0:00:00");
}

TEST(Progress, KnowsItsOwnMemory) { EXPECT_GT(resident_bytes(), int64_t{1} << 20); }

TEST(Progress, PrintsPlainLinesAwayFromATerminal) {
  std::ostringstream out;
  Progress progress(out, /*is_terminal=*/false, /*quiet=*/false, /*log_interval=*/4);
  for (int64_t step = 1; step <= 10; ++step) {
    progress.step(report_of(step, 10));
  }
  progress.finish();
  progress.line("done");
  EXPECT_EQ(out.str(), format_step(report_of(1, 10)) + "\n" + format_step(report_of(4, 10)) + "\n" +
                           format_step(report_of(8, 10)) + "\n" + format_step(report_of(10, 10)) + "\ndone\n");
}

TEST(Progress, RedrawsOneLineOnATerminal) {
  std::ostringstream out;
  Progress progress(out, /*is_terminal=*/true, /*quiet=*/false, /*log_interval=*/4);
  progress.step(report_of(1, 2));
  progress.line("in between");
  progress.step(report_of(2, 2));
  progress.finish();
  EXPECT_EQ(out.str(), "\r" + format_step(report_of(1, 2)) + "\x1b[K\r\x1b[Kin between\n\r" +
                           format_step(report_of(2, 2)) + "\x1b[K\n");
}

TEST(Progress, IsSilentOnOtherRanks) {
  std::ostringstream out;
  Progress progress(out, /*is_terminal=*/true, /*quiet=*/true, /*log_interval=*/1);
  progress.step(report_of(1, 1));
  progress.line("text");
  progress.finish();
  EXPECT_EQ(out.str(), "");
}

}  // namespace
}  // namespace fsdp::train
