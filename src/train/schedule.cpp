#include "train/schedule.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "train/option_checks.h"

namespace fsdp::train {

void ScheduleOptions::validate() const {
  check_at_least("steps", num_steps, 1);
  TORCH_CHECK_VALUE(peak > 0.0 && std::isfinite(peak), "lr must be positive and finite, but is ", peak);
  TORCH_CHECK_VALUE(min_factor >= 0.0 && min_factor <= 1.0, "min_lr_factor must lie in [0, 1], but is ", min_factor);
  TORCH_CHECK_VALUE(warmup_steps >= 0 && warmup_steps <= num_steps, "warmup_steps must lie in [0, steps = ", num_steps,
                    "], but is ", warmup_steps);
}

double learning_rate(const ScheduleOptions& options, int64_t step) {
  if (step < options.warmup_steps) {
    return options.peak * static_cast<double>(step + 1) / static_cast<double>(options.warmup_steps);
  }
  const auto num_decay = std::max<int64_t>(options.num_steps - options.warmup_steps, 1);
  const double progress =
      std::min(1.0, static_cast<double>(step - options.warmup_steps + 1) / static_cast<double>(num_decay));
  const double cosine = 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  return options.peak * (options.min_factor + (1.0 - options.min_factor) * cosine);
}

}  // namespace fsdp::train
