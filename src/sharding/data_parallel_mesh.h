#pragma once
// The mesh that fully_shard works on, out of one that serves several parallelisms.
#include <fsdp/fully_shard.h>

namespace fsdp::sharding {

// 1-D (shard, or replicate alone) or 2-D (replicate, shard), of this rank's part of `mesh` along the given dims; `mesh`
// itself when none is given. Collective. Errors: c10::ValueError for dims without mesh, names that the mesh does not
// have or that come twice, and dims that differ between ranks.
[[nodiscard]] DeviceMesh data_parallel_mesh(const DeviceMesh& mesh, const DataParallelMeshDims& dims);

// All ranks of that mesh in one dim: where parameters stay whole. Collective over the default group where no such group
// was made before. Errors: c10::Error for a mesh of several dims made from groups of other ranks than the default
// one's.
[[nodiscard]] DeviceMesh replica_mesh(const DeviceMesh& mesh, const DataParallelMeshDims& dims);

// Whole parameters on every rank, as replicate() leaves them.
[[nodiscard]] inline bool replicates_only(const DataParallelMeshDims& dims) {
  return dims.shard.empty() && !dims.replicate.empty();
}

}  // namespace fsdp::sharding
