#include "dtensor/gather.h"

#include <cmath>
#include <limits>

#include "comm/collectives.h"
#include "comm/group_state.h"
#include "comm/meeting.h"
#include "dtensor/layout.h"

namespace fsdp::dtensor {

namespace {

bool is_extreme(const Partial& partial) {
  const auto& op = partial.reduce_op;
  return op == "min" || op == "max" || (op == "norm" && std::isinf(partial.norm_type));
}

bool is_power(const Partial& partial) { return partial.reduce_op == "norm" && !std::isinf(partial.norm_type); }

// The plain reduction that carries a Partial.
c10d::ReduceOp::RedOpType transport(const Partial& partial) {
  const auto& op = partial.reduce_op;
  if (is_extreme(partial)) return op == "min" ? c10d::ReduceOp::MIN : c10d::ReduceOp::MAX;
  if (op == "product") return c10d::ReduceOp::PRODUCT;
  TORCH_CHECK_VALUE(op == "sum" || op == "avg" || op == "norm", "unknown reduction '", op,
                    "' in Partial; known: sum, avg, min, max, product");
  return c10d::ReduceOp::SUM;
}

bool marks_nans(const Partial& partial, at::ScalarType dtype) {
  return is_extreme(partial) && at::isFloatingType(dtype);
}

// What travels for `values` [n]. gloo's minimum and maximum lose NaNs, so [n] marks of them follow, which win in the
// same reduction. p-norms travel as sums of p-th powers, which half precision could not hold. gloo knows neither bool
// nor short.
at::Tensor before_transport(const at::Tensor& values, const Partial& partial) {
  const auto dtype = values.scalar_type();
  if (marks_nans(partial, dtype))
    return at::cat({values, values.isnan().to(dtype).mul_(partial.reduce_op == "min" ? -1 : 1)});
  if (is_power(partial)) return values.to(at::promote_types(dtype, at::kFloat)).pow(partial.norm_type);
  if (dtype == at::kBool) return values.to(at::kByte);
  return dtype == at::kShort ? values.to(at::kInt) : values;
}

at::Tensor after_transport(const at::Tensor& reduced, const Partial& partial, int64_t num_ranks, at::ScalarType dtype) {
  if (marks_nans(partial, dtype)) {
    const auto halves = reduced.chunk(2);
    return halves[0].masked_fill(halves[1].ne(0), std::numeric_limits<double>::quiet_NaN());
  }
  if (is_power(partial)) return reduced.pow(1.0 / partial.norm_type).to(dtype);
  return (partial.reduce_op == "avg" ? reduced / num_ranks : reduced).to(dtype);
}

// Unread values that can share one collective: same group, reduction and dtype.
struct Batch {
  Partial partial;
  size_t mesh_dim;
  std::vector<ShardState*> states;
};

void reduce_batch(const Batch& batch, const std::string& what) {
  auto& first = *batch.states.front();
  const auto mesh_dim = static_cast<int64_t>(batch.mesh_dim);
  std::vector<at::Tensor> flat;
  for (auto* state : batch.states) flat.push_back(state->local().reshape({-1}));
  const auto sent = before_transport(at::cat(flat), batch.partial);
  comm::all_reduce({sent}, first.mesh.get_group(mesh_dim), what, transport(batch.partial)).front().wait();
  const auto reduced = after_transport(sent, batch.partial, first.mesh.size(mesh_dim), first.local().scalar_type());
  int64_t offset = 0;
  for (auto* state : batch.states) {
    const auto numel = state->local().numel();
    state->set_local(reduced.narrow(0, offset, numel).view(state->local().sizes()).clone());
    state->placements[batch.mesh_dim] = Replicate{};
    offset += numel;
  }
}

bool same_batch(const Batch& batch, ShardState& state, size_t mesh_dim, const Partial& partial) {
  auto& first = *batch.states.front();
  return batch.mesh_dim == mesh_dim && batch.partial == partial && first.mesh == state.mesh &&
         first.local().scalar_type() == state.local().scalar_type();
}

}  // namespace

at::Tensor padded_rows(const at::Tensor& rows, int64_t length) {
  if (rows.size(0) == length) return rows.contiguous();
  auto sizes = rows.sizes().vec();
  sizes[0] = length;
  auto padded = at::zeros(sizes, rows.options());
  padded.narrow(0, 0, rows.size(0)).copy_(rows);
  return padded;
}

at::Tensor as_rows(const at::Tensor& part, int64_t dim, int64_t size, int64_t num_ranks) {
  return padded_rows(part.movedim(dim, 0), chunk_length(size, num_ranks));
}

at::Tensor empty_rows(const at::Tensor& rows, int64_t num_ranks) {
  auto sizes = rows.sizes().vec();
  sizes[0] *= num_ranks;
  return at::empty(sizes, rows.options());
}

at::Tensor from_rows(const at::Tensor& rows, int64_t dim, int64_t size) {
  return rows.narrow(0, 0, size).movedim(0, dim);
}

void check_has_values(ShardState& state) {
  if (state.is_pending()) return;  // a value is on its way
  TORCH_CHECK(!state.local().is_meta(), "'", state.path,
              "' is on the meta device and has no values yet: call fsdp::materialize(module, device, init) first");
}

at::Tensor gather_full(ShardState& state, at::IntArrayRef sizes) {
  const PlainScope plain;
  check_has_values(state);
  const auto coordinate = own_coordinate(state.mesh);
  auto full = state.local();
  for (size_t i = state.placements.size(); i-- > 0;) {
    const auto* shard = std::get_if<Shard>(&state.placements[i]);
    const auto num_ranks = state.mesh.size(static_cast<int64_t>(i));
    if (!shard || num_ranks == 1) continue;
    const auto size = sizes_before(sizes, state.mesh, state.placements, coordinate, i)[shard->dim];
    const auto rows = as_rows(full, shard->dim, size, num_ranks);
    const auto all_rows = empty_rows(rows, num_ranks);
    comm::all_gather(all_rows, rows, state.mesh.get_group(static_cast<int64_t>(i)), "gather of " + state.path).wait();
    full = from_rows(all_rows, shard->dim, size);
    if (state.ledger) state.ledger->count(&MemoryStats::num_all_gathers);
  }
  return full.is_same(state.local()) ? full.clone() : full.contiguous();
}

void meet(ShardState& state, const std::string& what) {
  check_has_values(state);
  for (size_t i = 0; i < state.placements.size(); ++i) {
    const auto mesh_dim = static_cast<int64_t>(i);
    if (is_replicate(state.placements[i]) || state.mesh.size(mesh_dim) == 1) continue;
    if (state.ledger) state.ledger->count(&MemoryStats::num_meetings);
    comm::meeting_of(state.mesh.get_group(mesh_dim))->meet(what);
  }
}

void reduce_partials(c10::ArrayRef<ShardState*> states, const Reason& reason) {
  if (states.empty()) return;
  const PlainScope plain;
  std::vector<Batch> batches;
  for (auto* state : states) {
    for (size_t i = 0; i < state->placements.size(); ++i) {
      const auto* partial = std::get_if<Partial>(&state->placements[i]);
      if (!partial) continue;
      if (state->mesh.size(static_cast<int64_t>(i)) == 1) {
        state->placements[i] = Replicate{};
        continue;
      }
      const auto found = std::find_if(batches.begin(), batches.end(),
                                      [&](const Batch& batch) { return same_batch(batch, *state, i, *partial); });
      if (found == batches.end()) {
        batches.push_back({*partial, i, {state}});
      } else if (std::find(found->states.begin(), found->states.end(), state) == found->states.end()) {
        found->states.push_back(state);
      }
    }
  }
  const auto what = reason.str();
  for (const auto& batch : batches) {
    meet(*batch.states.front(), what);
    reduce_batch(batch, what);
  }
}

}  // namespace fsdp::dtensor
