#pragma once
// The mean over the tokens of all ranks, where ranks hold different numbers of tokens.
//
//   auto sum = F::cross_entropy(logits, targets, options);           // .ignore_index(-100).reduction(torch::kSum)
//   auto num_tokens = targets.ne(-100).sum().item<int64_t>();
//   fsdp::mean_over_ranks(sum, num_tokens, mesh).backward();         // training
//   double loss = fsdp::token_mean(sum, num_tokens, mesh);           // for the log, and in evaluation
//
// fully_shard averages gradients over ranks. Were each rank's loss the mean over its own tokens, a token on a rank with
// few of them would weigh more than one on a rank with many. PyTorch: has no counterpart; trainers do it by hand.
#include <fsdp/device_mesh.h>

namespace fsdp {

// `loss_sum` is the sum of this rank's losses, one floating number; `num_tokens` says over how many. Returns
// loss_sum * ranks / tokens of all ranks: its mean over the ranks is the mean over all tokens, and so are the averaged
// gradients. A rank without tokens takes part with a sum of zero; without tokens on any rank the result is zero, with a
// graph all the same. The mesh is that of fully_shard. Collective: one all-reduce of two numbers a mesh dim.
// Errors: on every rank, c10::ValueError when one rank gave a negative number or a loss that is not one floating
// number; c10::DistError when ranks do not come.
[[nodiscard]] at::Tensor mean_over_ranks(const at::Tensor& loss_sum, int64_t num_tokens, const DeviceMesh& mesh);
[[nodiscard]] at::Tensor mean_over_ranks(const at::Tensor& loss_sum, int64_t num_tokens, const ProcessGroup& group);

// The mean over the tokens of all ranks itself, the same number on each of them: for logs and evaluation. Zero without
// tokens on any rank. Collective; errors as above.
[[nodiscard]] double token_mean(const at::Tensor& loss_sum, int64_t num_tokens, const DeviceMesh& mesh);

// The factor by which mean_over_ranks multiplies: ranks / tokens of all ranks, or 0 without tokens. With gradient
// accumulation, call it once with the tokens of all micro-batches and multiply each micro-batch's sum by it.
// Collective; errors as above.
[[nodiscard]] double token_weight(int64_t num_tokens, const DeviceMesh& mesh);

}  // namespace fsdp
