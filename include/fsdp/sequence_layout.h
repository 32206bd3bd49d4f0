#pragma once
// How the tokens of a sequence are dealt to the ranks of a context-parallel group.
//
//   using fsdp::SequenceSplit;
//   auto mine = fsdp::local_positions(8, rank, 2, SequenceSplit::kHeadTail);   // rank 0: 0 1 6 7, rank 1: 2 3 4 5
//   auto x_local = x.index_select(1, mine);                                    // shard: [B, S, d] -> [B, S_local, d]
//
//   auto order = fsdp::restore_index(8, 2, SequenceSplit::kHeadTail);
//   auto y = gathered.index_select(1, order);   // unshard, lossless; gathered: the ranks' rows, in rank order
//
// The same positions are what rotary and learnt position embeddings need: those of a rank do not start at 0.
#include <torch/types.h>

#include <vector>

namespace fsdp {

enum class SequenceSplit {
  // Rank r holds chunk r of num_ranks chunks of ceil(S / num_ranks) tokens, as Shard cuts; the last ranks may hold
  // fewer, or none.
  kContiguous,
  // Zigzag: chunks r and 2 num_ranks - 1 - r of 2 num_ranks chunks, so that causal attention costs every rank the same.
  // When S does not divide, the first S mod (2 num_ranks) chunks hold one token more. PyTorch's head-tail load
  // balancer, which needs S to divide.
  kHeadTail,
};

// Errors of all functions: c10::ValueError for a length or number of ranks below 1, a rank outside 0 .. num_ranks - 1.
// None communicates.

// How many tokens `rank` holds.
[[nodiscard]] int64_t num_local_tokens(int64_t sequence_length, int64_t rank, int64_t num_ranks, SequenceSplit split);

// int64 [S_local], ascending: which token of the whole sequence each row of `rank` is.
[[nodiscard]] torch::Tensor local_positions(int64_t sequence_length, int64_t rank, int64_t num_ranks,
                                            SequenceSplit split);

// int64 [S]: selects the whole sequence from the rows of all ranks, concatenated in rank order.
[[nodiscard]] torch::Tensor restore_index(int64_t sequence_length, int64_t num_ranks, SequenceSplit split);

// How many (query, key) pairs causal attention costs `rank`: a measure of balance. Split contiguously the last of two
// ranks does about three times the work of the first.
[[nodiscard]] int64_t attended_pairs(int64_t sequence_length, int64_t rank, int64_t num_ranks, SequenceSplit split);

// Documents of these lengths packed one after the other, each dealt by kHeadTail on its own: int64 [sum / num_ranks]. A
// rank's rows of a document are consecutive, so that attention within documents is one causal call a document on
// narrow(2, begin / num_ranks, length / num_ranks). The restoring index is the argsort of all ranks' positions,
// concatenated. Errors: also c10::ValueError for a length that 2 num_ranks does not divide. PyTorch:
// _PerDocumentHeadTailLoadBalancer.
[[nodiscard]] torch::Tensor document_positions(const std::vector<int64_t>& lengths, int64_t rank, int64_t num_ranks);

}  // namespace fsdp
