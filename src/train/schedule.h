#pragma once
// The learning rate over the run: linear warm-up, then half a cosine down to a fraction of the peak.
#include <cstdint>

namespace fsdp::train {

struct ScheduleOptions {
  double peak = 1e-3;
  double min_factor = 0.1;  // the last step's rate as a fraction of the peak
  int64_t warmup_steps = 0;
  int64_t num_steps = 1;

  // Errors: c10::ValueError naming the value that is impossible.
  void validate() const;
};

// Of step 0 .. num_steps - 1. The warm-up ends at the peak; the last step has peak * min_factor.
[[nodiscard]] double learning_rate(const ScheduleOptions& options, int64_t step);

}  // namespace fsdp::train
