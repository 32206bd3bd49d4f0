#pragma once
// A sharded tensor to and from the first rank of its mesh, at the cost of about one whole tensor there and of one part
// on the other ranks. The bytes are charged to the tensor's ledger as buffers.
#include "dtensor/shard_state.h"

namespace fsdp::dtensor {

// The whole value of `sizes` as a new tensor on the mesh's first rank; undefined elsewhere. Collective; does not meet
// the other ranks first.
[[nodiscard]] at::Tensor gather_to_first_rank(ShardState& state, at::IntArrayRef sizes);

// Every rank's part <- its part of the first rank's `whole`, which is undefined elsewhere. `whole` may have any dtype,
// device and strides. Collective; does not meet first.
void scatter_from_first_rank(ShardState& state, at::IntArrayRef sizes, const at::Tensor& whole);

}  // namespace fsdp::dtensor
