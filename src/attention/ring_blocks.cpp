#include "attention/ring_blocks.h"

namespace fsdp::attention {

int64_t RingCall::source_of(int64_t step) const {
  return (sequence.rank - step + sequence.num_ranks()) % sequence.num_ranks();
}

RingBlock block_of_step(const RingCall& call, int64_t step, int64_t num_queries) {
  const auto& shards = call.sequence.shards;
  const auto source = call.source_of(step);
  const auto num_keys = shards.num_rows(source);
  if (!call.is_causal || step == 0) return {0, num_queries, num_keys, call.is_causal};
  const bool is_before = source < call.sequence.rank;
  if (shards.split == SequenceSplit::kContiguous) return {0, is_before ? num_queries : 0, num_keys, false};
  if (is_before) return {0, num_queries, shards.num_head_rows(source), false};
  const auto num_head_queries = shards.num_head_rows(call.sequence.rank);
  return {num_head_queries, num_queries - num_head_queries, num_keys, false};
}

}  // namespace fsdp::attention
