#include "sharding/flat_layout.h"

#include <numeric>

#include "dtensor/layout.h"

namespace fsdp::sharding {

namespace {

// Start of each gathered parameter: what LibTorch's allocator gives, and vector kernels like.
constexpr int64_t kGatheredAlignment = 64;

int64_t align(int64_t bytes, int64_t alignment) { return (bytes + alignment - 1) / alignment * alignment; }

SlotLayout make_slot(const SlotShape& shape, int64_t num_ranks) {
  SlotLayout slot;
  slot.sizes = shape.sizes;
  slot.dtype = shape.dtype;
  slot.rows = shape.sizes.front();
  slot.row_numel = std::accumulate(shape.sizes.begin() + 1, shape.sizes.end(), int64_t{1}, std::multiplies<>());
  slot.chunk_rows = dtensor::chunk_length(slot.rows, num_ranks);
  return slot;
}

}  // namespace

FlatLayout make_layout(const std::vector<SlotShape>& shapes, int64_t num_ranks) {
  FlatLayout layout;
  for (const auto& shape : shapes) layout.slots.push_back(make_slot(shape, num_ranks));
  std::vector<size_t> order(shapes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto rank_of = [&](size_t i) { return std::make_pair(-layout.slots[i].itemsize(), shapes[i].dtype); };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return rank_of(a) < rank_of(b); });
  for (const auto i : order) {
    auto& slot = layout.slots[i];
    slot.shard_offset = layout.row_bytes;
    slot.gathered_offset = layout.gathered_bytes;
    layout.row_bytes += slot.shard_bytes();
    layout.gathered_bytes += align(slot.shard_bytes() * num_ranks, kGatheredAlignment);
  }
  return layout;
}

std::pair<int64_t, int64_t> own_rows(const SlotLayout& slot, int64_t rank) {
  const auto begin = std::min(slot.rows, slot.chunk_rows * rank);
  return {begin, std::min(slot.rows, begin + slot.chunk_rows)};
}

}  // namespace fsdp::sharding
