#include "dtensor/rank0.h"

#include "comm/collectives.h"
#include "dtensor/gather.h"
#include "dtensor/layout.h"

namespace fsdp::dtensor {

namespace {

Charge charge_for(const ShardState& state, const at::Tensor& tensor) {
  return {state.ledger, &MemoryStats::buffers, static_cast<int64_t>(tensor.nbytes())};
}

// One mesh dim of a gather: the part as it was before that dim cut it, on the group's rank 0.
at::Tensor gather_along(const ShardState& state, const at::Tensor& part, int64_t dim, int64_t size,
                        const ProcessGroup& group) {
  const auto num_ranks = group->getSize();
  const auto rows = as_rows(part, dim, size, num_ranks);
  const bool collects = group->getRank() == 0;
  const auto all_rows = collects ? empty_rows(rows, num_ranks) : at::Tensor();
  const auto charge = charge_for(state, collects ? all_rows : rows);
  comm::gather_to_rank0(all_rows, rows, group, state.path).wait();
  return collects ? from_rows(all_rows, dim, size) : at::Tensor();
}

// One mesh dim of a scatter: `value` is on the group's rank 0, and every rank gets its chunk.
at::Tensor scatter_along(const ShardState& state, const at::Tensor& value, int64_t dim, std::vector<int64_t> sizes,
                         const ProcessGroup& group, const at::TensorOptions& options) {
  const auto num_ranks = group->getSize();
  const auto size = sizes[dim];
  const auto length = chunk_length(size, num_ranks);
  std::vector<at::Tensor> chunks;  // views of `value` where chunks are full rows of it
  for (int r = 0; group->getRank() == 0 && r < num_ranks; ++r) {
    const auto extent = chunk_extent(size, num_ranks, r);
    chunks.push_back(padded_rows(value.movedim(dim, 0).narrow(0, extent.begin, extent.size()), length));
  }
  sizes.erase(sizes.begin() + dim);
  sizes.insert(sizes.begin(), length);
  const auto chunk = at::empty(sizes, options);
  const auto charge = charge_for(state, chunk);
  comm::scatter_from_rank0(chunk, chunks, group, state.path).wait();
  return chunk.narrow(0, 0, chunk_extent(size, num_ranks, group->getRank()).size()).movedim(0, dim);
}

at::Tensor broadcast_along(const at::Tensor& value, at::IntArrayRef sizes, const ProcessGroup& group,
                           const at::TensorOptions& options, const std::string& path) {
  const auto copy = group->getRank() == 0 ? value.contiguous() : at::empty(sizes, options);
  comm::broadcast(copy, 0, group, path).wait();
  return copy;
}

}  // namespace

// From the last mesh dim to the first. Whoever is not rank 0 along a dim is done after it.
at::Tensor gather_to_first_rank(ShardState& state, at::IntArrayRef sizes) {
  const PlainScope plain;
  const auto coordinate = own_coordinate(state.mesh);
  for (size_t i = 0; i < coordinate.size(); ++i)
    if (!is_shard(state.placements[i]) && coordinate[i] != 0) return {};  // a replica
  auto value = state.local();
  for (size_t i = coordinate.size(); i-- > 0;) {
    const auto* shard = std::get_if<Shard>(&state.placements[i]);
    const auto mesh_dim = static_cast<int64_t>(i);
    if (!shard || state.mesh.size(mesh_dim) == 1) continue;
    const auto size = sizes_before(sizes, state.mesh, state.placements, coordinate, i)[shard->dim];
    value = gather_along(state, value, shard->dim, size, state.mesh.get_group(mesh_dim));
    if (coordinate[i] != 0) return {};
  }
  return value.is_alias_of(state.local()) ? value.clone() : value.contiguous();
}

// From the first mesh dim to the last. Along a dim take part the ranks that are first along all later dims: one of them
// has the value.
void scatter_from_first_rank(ShardState& state, at::IntArrayRef sizes, const at::Tensor& whole) {
  const PlainScope plain;
  const auto coordinate = own_coordinate(state.mesh);
  const auto options = state.local().options();
  auto value = whole.defined() ? whole.detach().to(options) : whole;
  const auto charge = value.defined() && !value.is_alias_of(whole) ? charge_for(state, value) : Charge();
  for (size_t i = 0; i < coordinate.size(); ++i) {
    const auto later = coordinate.begin() + static_cast<std::ptrdiff_t>(i) + 1;
    const auto mesh_dim = static_cast<int64_t>(i);
    const bool takes_part = std::all_of(later, coordinate.end(), [](int64_t c) { return c == 0; });
    if (!takes_part || state.mesh.size(mesh_dim) == 1) continue;
    const auto group = state.mesh.get_group(mesh_dim);
    const auto before = sizes_before(sizes, state.mesh, state.placements, coordinate, i);
    const auto* shard = std::get_if<Shard>(&state.placements[i]);
    value = shard ? scatter_along(state, value, shard->dim, before, group, options)
                  : broadcast_along(value, before, group, options, state.path);
  }
  auto local = state.local();
  local.copy_(value);
}

}  // namespace fsdp::dtensor
