#include <c10/util/Exception.h>

#include <cmath>
#include <filesystem>

#include "train/option_checks.h"
#include "train/trainer.h"

namespace fsdp::train {
namespace {

void check_not_negative(const char* name, double value) {
  TORCH_CHECK_VALUE(value >= 0.0 && std::isfinite(value), name, " must not be negative, but is ", value);
}

// Found out before the training, not after it.
void check_can_save(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  TORCH_CHECK_VALUE(!fs::is_directory(path, error), "cannot save to ", path, ": it is a folder; name a file in it");
  const auto folder = fs::absolute(path, error).parent_path();
  TORCH_CHECK_VALUE(fs::is_directory(folder, error), "cannot save to ", path, ": there is no folder ", folder.string());
}

}  // namespace

void TrainOptions::validate() const {
  model.validate();
  schedule.validate();
  sample.validate();
  check_at_least("batch_size", batch_size, 1);
  check_at_least("gradient_accumulation_steps", gradient_accumulation_steps, 1);
  check_at_least("eval_interval", eval_interval, 0);
  check_at_least("eval_windows", num_eval_windows, 1);
  check_at_least("log_interval", log_interval, 1);
  check_not_negative("weight_decay", weight_decay);
  check_not_negative("max_norm", max_norm);
  check_not_negative("time_limit", time_limit);
  TORCH_CHECK_VALUE(model.vocab_size == 256, "text is read byte by byte: vocab_size must be 256, but is ",
                    model.vocab_size);
  validate_context_parallel();
  if (!save.empty()) {
    check_can_save(save);
  }
}

void TrainOptions::validate_context_parallel() const {
  const auto degree = context_parallel.degree;
  check_at_least("context_parallel_degree", degree, 1);
  if (degree == 1) return;
  TORCH_CHECK_VALUE(model.seq_len >= degree, "seq_len ", model.seq_len, " is shorter than context_parallel_degree ",
                    degree);
  if (context_parallel.method == ContextParallelMethod::kRing) {
    TORCH_CHECK_VALUE(model.dropout == 0.0, "dropout ", model.dropout, " with context_parallel_method ring, which has ",
                      "none inside attention. Hint: --dropout 0, or --context-parallel-method ulysses.");
  } else {
    TORCH_CHECK_VALUE(model.num_heads % degree == 0, "num_heads ", model.num_heads, " does not divide over ",
                      "context_parallel_degree ", degree,
                      " as the method ulysses needs. Hint: ", "--context-parallel-method ring.");
  }
}

void TrainOptions::validate_for(int64_t world_size) const {
  TORCH_CHECK_VALUE(world_size % context_parallel.degree == 0, "context_parallel_degree ", context_parallel.degree,
                    " does not divide the ", world_size, world_size == 1 ? " rank" : " ranks",
                    ". Hint: start a multiple of it, with fsdp run --nproc-per-node.");
  const auto num_teams = world_size / context_parallel.degree;
  const auto unit = num_teams * gradient_accumulation_steps;
  TORCH_CHECK_VALUE(batch_size % unit == 0, "batch_size ", batch_size, " does not divide evenly over ", num_teams,
                    num_teams == 1 ? " rank" : " ranks",
                    context_parallel.degree == 1 ? "" : " with sequences of their own", " x ",
                    gradient_accumulation_steps, " micro batches. Hint: use a multiple of ", unit, '.');
}

}  // namespace fsdp::train
