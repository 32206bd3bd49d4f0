#pragma once
// Where each parameter of a group lies in the group's rows.
//
// A group is gathered by one collective: every rank sends a row of bytes, the concatenation of its padded shards. Slots
// are ordered by dtype, widest first, so that each shard is aligned without gaps. A parameter of n rows gives every
// rank c = ceil(n / num_ranks) rows; missing ones are zeros.
#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp::sharding {

struct SlotLayout {
  std::vector<int64_t> sizes;  // global
  at::ScalarType dtype = at::kFloat;
  int64_t rows = 0;             // sizes[0]
  int64_t row_numel = 0;        // product of the other sizes
  int64_t chunk_rows = 0;       // c
  int64_t shard_offset = 0;     // bytes, in a rank's row
  int64_t gathered_offset = 0;  // bytes, in the gathered block

  [[nodiscard]] int64_t itemsize() const { return static_cast<int64_t>(c10::elementSize(dtype)); }
  [[nodiscard]] int64_t shard_numel() const { return chunk_rows * row_numel; }  // padded
  [[nodiscard]] int64_t shard_bytes() const { return shard_numel() * itemsize(); }
};

struct FlatLayout {
  std::vector<SlotLayout> slots;  // in the group's order; offsets follow dtype order
  int64_t row_bytes = 0;          // what a rank sends
  int64_t gathered_bytes = 0;     // the block of all gathered parameters, with gaps for alignment
};

struct SlotShape {
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
};
[[nodiscard]] FlatLayout make_layout(const std::vector<SlotShape>& shapes, int64_t num_ranks);

// Rows [begin, end) of the slot that `rank` holds.
[[nodiscard]] std::pair<int64_t, int64_t> own_rows(const SlotLayout& slot, int64_t rank);

}  // namespace fsdp::sharding
