#pragma once
// Which rank holds which tokens: fsdp/sequence_layout.h, as extents.
#include <fsdp/sequence_layout.h>

#include <vector>

#include "dtensor/layout.h"

namespace fsdp::attention {

using dtensor::Extent;

// Rows of a sequence that lie together both in the rank-major order of a gather and in the sequence.
struct RowRun {
  int64_t gathered;  // first row, where the rows of all ranks are concatenated
  int64_t position;  // first row in the sequence
  int64_t length;
};

struct SequenceShards {
  int64_t length = 1;
  int64_t num_ranks = 1;
  SequenceSplit split = SequenceSplit::kContiguous;

  // Positions of the rows of `rank`, in order: one extent, or a head and a tail. Extents may be empty.
  [[nodiscard]] std::vector<Extent> chunks_of(int64_t rank) const;
  [[nodiscard]] int64_t num_rows(int64_t rank) const;
  // Of the first chunk; with kHeadTail the tail follows.
  [[nodiscard]] int64_t num_head_rows(int64_t rank) const { return chunks_of(rank).front().size(); }
  [[nodiscard]] int64_t max_rows() const;
  [[nodiscard]] std::vector<int64_t> rows_by_rank() const;
  [[nodiscard]] std::vector<RowRun> runs() const;
};

}  // namespace fsdp::attention
