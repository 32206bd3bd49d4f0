#pragma once
// The mesh that fully_shard works on, out of one that serves several parallelisms.
#include <fsdp/fully_shard.h>

namespace fsdp::sharding {

// 1-D (shard) or 2-D (replicate, shard), of this rank's part of `mesh` along the given dims; `mesh` itself when none is
// given. Collective over all ranks of the default group where several dims are flattened into one. Errors:
// c10::ValueError for dims without mesh or names that the mesh does not have or that come twice.
[[nodiscard]] DeviceMesh data_parallel_mesh(const DeviceMesh& mesh, const DataParallelMeshDims& dims);

}  // namespace fsdp::sharding
