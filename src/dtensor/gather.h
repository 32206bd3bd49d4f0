#pragma once
// Collectives on whole sharded tensors: gathering one, and reducing unread partial results.
#include <c10/util/ArrayRef.h>

#include "dtensor/owner.h"
#include "dtensor/shard_state.h"

namespace fsdp::dtensor {

// The whole of `state`, a new plain tensor of `sizes`. Collective over the sharded mesh dims; does not meet first.
[[nodiscard]] at::Tensor gather_full(ShardState& state, at::IntArrayRef sizes);

// `rows` followed by zeros up to `length` rows, contiguous; `rows` itself when it is both already.
[[nodiscard]] at::Tensor padded_rows(const at::Tensor& rows, int64_t length);

// One mesh dim of a gather: every rank's `part`, cut along `dim` from `size`, travels as rows, equally many from each.
[[nodiscard]] at::Tensor as_rows(const at::Tensor& part, int64_t dim, int64_t size, int64_t num_ranks);
[[nodiscard]] at::Tensor empty_rows(const at::Tensor& rows, int64_t num_ranks);         // room for those of all ranks
[[nodiscard]] at::Tensor from_rows(const at::Tensor& rows, int64_t dim, int64_t size);  // the whole again

// Errors: c10::Error when `state` is on the meta device and so has no values yet.
void check_has_values(ShardState& state);

// Meets all ranks of the mesh in the store: no rank may start an unplanned read alone.
// Errors: also those of check_has_values().
void meet(ShardState& state, const std::string& what);

// Turns Partial values into Replicate ones, in place and for all their handles: one collective for each mesh dim and
// reduction, however many tensors there are. Meets first.
void reduce_partials(c10::ArrayRef<ShardState*> states, const Reason& reason);

}  // namespace fsdp::dtensor
