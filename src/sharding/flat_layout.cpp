#include "sharding/flat_layout.h"

#include <numeric>

#include "dtensor/layout.h"

namespace fsdp::sharding {

namespace {

// Start of each gathered parameter: what LibTorch's allocator gives, and vector kernels like.
constexpr int64_t kGatheredAlignment = 64;
// The widest element, complex128: the rows of all ranks can be viewed as any dtype.
constexpr int64_t kRowAlignment = 16;

SlotLayout make_slot(const SlotShape& shape, int64_t num_ranks) {
  SlotLayout slot;
  slot.sizes = shape.sizes;
  slot.dtype = shape.dtype;
  slot.dim = shape.dim;
  slot.n = shape.sizes[static_cast<size_t>(shape.dim)];
  const auto at_dim = shape.sizes.begin() + shape.dim;
  slot.before = std::accumulate(shape.sizes.begin(), at_dim, int64_t{1}, std::multiplies<>());
  slot.after = std::accumulate(at_dim + 1, shape.sizes.end(), int64_t{1}, std::multiplies<>());
  slot.num_ranks = num_ranks;
  slot.chunk = dtensor::chunk_length(slot.n, num_ranks);
  return slot;
}

}  // namespace

std::vector<int64_t> SlotLayout::shard_sizes(int64_t rank) const {
  auto shard = sizes;
  shard[static_cast<size_t>(dim)] = rows_of(rank).size();
  return shard;
}

FlatLayout make_layout(const std::vector<SlotShape>& shapes, int64_t num_ranks) {
  FlatLayout layout;
  for (const auto& shape : shapes) layout.slots.push_back(make_slot(shape, num_ranks));
  std::vector<size_t> order(shapes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto rank_of = [&](size_t i) { return std::make_pair(-layout.slots[i].itemsize(), shapes[i].dtype); };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return rank_of(a) < rank_of(b); });
  for (const auto i : order) {
    auto& slot = layout.slots[i];
    slot.shard_offset = layout.shard_bytes;
    slot.gathered_offset = num_ranks == 1 ? slot.shard_offset : layout.gathered_bytes;
    layout.shard_bytes += slot.shard_bytes();
    layout.gathered_bytes += align(slot.shard_bytes() * num_ranks, kGatheredAlignment);
  }
  if (num_ranks == 1) layout.gathered_bytes = layout.shard_bytes;
  layout.row_bytes = align(layout.shard_bytes + kFingerprintBytes, kRowAlignment);
  return layout;
}

}  // namespace fsdp::sharding
