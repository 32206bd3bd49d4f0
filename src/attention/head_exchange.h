#pragma once
// The all-to-all between a sequence cut by tokens and one cut by heads.
//
//   tokens: [B, H, S_local, D] on every rank  <->  heads: [B, H / W, S, D] on every rank
//
// Sequence-major on the wire, so that what arrives is the attention kernel's input as it lies there.
#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <vector>

#include "attention/attention_checks.h"

namespace fsdp::attention {

// How the heads of one tensor go to the ranks: `num_blocks` blocks of `heads`, each to `copies` consecutive ranks.
struct HeadSplit {
  int64_t num_blocks;
  int64_t copies;
  int64_t heads;
};

// Of the query, and of the keys and values. Errors: c10::ValueError when they cannot be dealt.
[[nodiscard]] HeadSplit split_query_heads(int64_t num_heads, int64_t num_ranks);
[[nodiscard]] HeadSplit split_key_heads(int64_t num_query_heads, int64_t num_heads, int64_t num_ranks);

class HeadExchange : public torch::CustomClassHolder {
 public:
  HeadExchange(SequenceGroup sequence, std::vector<HeadSplit> splits, std::string what);

  // One all-to-all for all tensors; they differ in heads only. Neither records a graph.
  // [B, H_i, S_local, D] -> [B, heads_i, S, D]
  [[nodiscard]] std::vector<at::Tensor> to_heads(at::TensorList tokens) const;
  // [B, heads_i, S, D] -> [B, H_i, S_local, D]; what copies hold is added.
  [[nodiscard]] std::vector<at::Tensor> to_tokens(at::TensorList heads) const;

 private:
  [[nodiscard]] std::vector<int64_t> counts_by_rank(int64_t row_numel) const;
  [[nodiscard]] at::Tensor in_sequence_order(const at::Tensor& gathered) const;
  [[nodiscard]] at::Tensor in_rank_order(at::TensorList heads) const;

  SequenceGroup sequence_;
  std::vector<HeadSplit> splits_;
  std::string what_;
  int64_t num_rows_;            // of this rank
  std::vector<int64_t> heads_;  // of each tensor, on one rank
  int64_t num_heads_ = 0;       // of all tensors, on one rank
};

// Differentiable, each being the other's backward.
[[nodiscard]] std::vector<at::Tensor> exchange_to_heads(at::TensorList tokens,
                                                        const c10::intrusive_ptr<HeadExchange>& exchange);
[[nodiscard]] std::vector<at::Tensor> exchange_to_tokens(at::TensorList heads,
                                                         const c10::intrusive_ptr<HeadExchange>& exchange);

}  // namespace fsdp::attention
