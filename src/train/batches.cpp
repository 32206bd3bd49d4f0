#include "train/batches.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "train/option_checks.h"

namespace fsdp::train {
namespace {

// SplitMix64: turns consecutive numbers into independent ones, without a state that ranks would have to share.
uint64_t mix_bits(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// Inputs and targets as two windows of the text, one byte apart.
void copy_window(const at::Tensor& tokens, int64_t start, int64_t seq_len, const Batch& batch, int64_t row) {
  batch.inputs[row].copy_(tokens.narrow(0, start, seq_len));
  batch.targets[row].copy_(tokens.narrow(0, start + 1, seq_len));
}

Batch empty_batch(int64_t num_rows, int64_t seq_len) {
  return {at::empty({num_rows, seq_len}, at::kLong), at::empty({num_rows, seq_len}, at::kLong)};
}

}  // namespace

BatchSampler::BatchSampler(at::Tensor tokens, int64_t seq_len, uint64_t seed)
    : tokens_(std::move(tokens)), seq_len_(seq_len), seed_(seed) {
  TORCH_CHECK_VALUE(tokens_.numel() > seq_len, "a text of ", tokens_.numel(), " bytes holds no sequence of ", seq_len,
                    " bytes and the one after");
}

int64_t BatchSampler::offset(int64_t step, int64_t row) const {
  const auto bits = mix_bits(mix_bits(mix_bits(seed_) + static_cast<uint64_t>(step)) + static_cast<uint64_t>(row));
  return static_cast<int64_t>(bits % static_cast<uint64_t>(tokens_.numel() - seq_len_));
}

Batch BatchSampler::rows(int64_t step, int64_t first_row, int64_t num_rows) const {
  const auto batch = empty_batch(num_rows, seq_len_);
  for (int64_t row = 0; row < num_rows; ++row) {
    copy_window(tokens_, offset(step, first_row + row), seq_len_, batch, row);
  }
  return batch;
}

FixedWindows::FixedWindows(at::Tensor tokens, int64_t seq_len, int64_t max_windows)
    : tokens_(std::move(tokens)), seq_len_(seq_len) {
  check_at_least("max_windows", max_windows, 1);
  const auto num_starts = tokens_.numel() - seq_len;  // places where a window and the byte after it fit
  TORCH_CHECK_VALUE(num_starts > 0, "a text of ", tokens_.numel(), " bytes holds no window of ", seq_len,
                    " bytes and the one after");
  num_windows_ = std::min((tokens_.numel() - 1) / seq_len, max_windows);
  stride_ = num_windows_ > 1 ? (num_starts - 1) / (num_windows_ - 1) : 0;
}

Batch FixedWindows::rows(int64_t first, int64_t num_rows) const {
  const auto batch = empty_batch(num_rows, seq_len_);
  for (int64_t row = 0; row < num_rows; ++row) {
    copy_window(tokens_, std::min(first + row, num_windows_ - 1) * stride_, seq_len_, batch, row);
  }
  return batch;
}

}  // namespace fsdp::train
