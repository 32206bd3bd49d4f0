#pragma once
// Which sequences each rank sees: a function of (seed, step, rank) alone, with the same joined batch at every world
// size.
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp::train {

struct Batch {
  at::Tensor inputs;   // int64 [B, T]
  at::Tensor targets;  // int64 [B, T], the byte after each input
};

// Random windows of the training text. Row i of the joined batch of `step` is the same whoever computes it.
class BatchSampler {
 public:
  // tokens: uint8 [N] with N > seq_len.
  BatchSampler(at::Tensor tokens, int64_t seq_len, uint64_t seed);

  // Rows [first_row, first_row + num_rows) of the joined batch of `step`.
  [[nodiscard]] Batch rows(int64_t step, int64_t first_row, int64_t num_rows) const;

  // Where row `row` of `step` starts in the text.
  [[nodiscard]] int64_t offset(int64_t step, int64_t row) const;

 private:
  at::Tensor tokens_;
  int64_t seq_len_;
  uint64_t seed_;
};

// Windows of seq_len bytes spread evenly over a text, for a validation loss that is comparable between runs.
class FixedWindows {
 public:
  // At most max_windows, fewer when the text holds fewer without overlap. Errors: c10::ValueError when it holds none.
  FixedWindows(at::Tensor tokens, int64_t seq_len, int64_t max_windows);

  [[nodiscard]] int64_t size() const { return num_windows_; }
  [[nodiscard]] int64_t seq_len() const { return seq_len_; }
  // Windows [first, first + num_rows); rows past the last window repeat it, so that every rank can run equally often.
  [[nodiscard]] Batch rows(int64_t first, int64_t num_rows) const;

 private:
  at::Tensor tokens_;
  int64_t seq_len_;
  int64_t num_windows_;
  int64_t stride_;
};

}  // namespace fsdp::train
