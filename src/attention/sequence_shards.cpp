#include "attention/sequence_shards.h"

#include <algorithm>

namespace fsdp::attention {

std::vector<Extent> SequenceShards::chunks_of(int64_t rank) const {
  if (split == SequenceSplit::kContiguous) return {dtensor::chunk_extent(length, num_ranks, rank)};
  const auto num_chunks = 2 * num_ranks;
  const auto begin_of = [&](int64_t chunk) {
    return chunk * (length / num_chunks) + std::min(chunk, length % num_chunks);
  };
  const auto tail = num_chunks - 1 - rank;
  return {{begin_of(rank), begin_of(rank + 1)}, {begin_of(tail), begin_of(tail + 1)}};
}

int64_t SequenceShards::num_rows(int64_t rank) const {
  int64_t num_rows = 0;
  for (const auto& chunk : chunks_of(rank)) num_rows += chunk.size();
  return num_rows;
}

std::vector<int64_t> SequenceShards::rows_by_rank() const {
  std::vector<int64_t> rows;
  rows.reserve(num_ranks);
  for (int64_t rank = 0; rank < num_ranks; ++rank) rows.push_back(num_rows(rank));
  return rows;
}

int64_t SequenceShards::max_rows() const {
  const auto rows = rows_by_rank();
  return *std::max_element(rows.begin(), rows.end());
}

std::vector<RowRun> SequenceShards::runs() const {
  if (split == SequenceSplit::kContiguous) return {{0, 0, length}};
  std::vector<RowRun> runs;
  int64_t gathered = 0;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    for (const auto& chunk : chunks_of(rank)) {
      runs.push_back({gathered, chunk.begin, chunk.size()});
      gathered += chunk.size();
    }
  }
  return runs;
}

}  // namespace fsdp::attention
