#pragma once
// Where each parameter of a group lies in the group's rows.
//
// A group is gathered by one collective: every rank sends a row of bytes, the concatenation of its padded shards and a
// fingerprint of 8 bytes at its end. Slots are ordered by dtype, widest first, so that each shard is aligned without
// gaps. A parameter of n entries on its sharded dim gives every rank c = ceil(n / num_ranks) of them; missing ones are
// zeros. The row of a single rank is the gathered block already.
#include <ATen/core/Tensor.h>

#include <vector>

#include "dtensor/layout.h"

namespace fsdp::sharding {

inline constexpr int64_t kFingerprintBytes = 8;
[[nodiscard]] constexpr int64_t align(int64_t bytes, int64_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

// A parameter [before, n, after], cut on the dim of size n.
struct SlotLayout {
  std::vector<int64_t> sizes;  // global
  at::ScalarType dtype = at::kFloat;
  int64_t dim = 0;              // the sharded one
  int64_t n = 0;                // sizes[dim]
  int64_t before = 1;           // product of the sizes in front of dim
  int64_t after = 1;            // product of the sizes behind it
  int64_t num_ranks = 1;        // over which it is cut
  int64_t chunk = 0;            // c
  int64_t shard_offset = 0;     // bytes, in a rank's row
  int64_t gathered_offset = 0;  // bytes, in the gathered block

  [[nodiscard]] int64_t itemsize() const { return static_cast<int64_t>(c10::elementSize(dtype)); }
  [[nodiscard]] int64_t shard_numel() const { return before * chunk * after; }  // padded
  [[nodiscard]] int64_t shard_bytes() const { return shard_numel() * itemsize(); }
  [[nodiscard]] int64_t numel() const { return before * n * after; }
  // The entries of the sharded dim that `rank` holds, and the sizes of that shard.
  [[nodiscard]] dtensor::Extent rows_of(int64_t rank) const { return dtensor::chunk_extent(n, num_ranks, rank); }
  [[nodiscard]] std::vector<int64_t> shard_sizes(int64_t rank) const;
};

struct FlatLayout {
  std::vector<SlotLayout> slots;  // in the group's order; offsets follow dtype order
  int64_t shard_bytes = 0;        // of all slots, padded
  int64_t row_bytes = 0;          // what a rank sends: the shards, a gap for alignment, the fingerprint
  int64_t gathered_bytes = 0;     // the block of all gathered parameters, with gaps for alignment
};

struct SlotShape {
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
  int64_t dim = 0;
};
[[nodiscard]] FlatLayout make_layout(const std::vector<SlotShape>& shapes, int64_t num_ranks);

}  // namespace fsdp::sharding
