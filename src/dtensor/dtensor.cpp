#include <fsdp/dtensor.h>

#include "dtensor/gather.h"
#include "dtensor/shard_state.h"

namespace fsdp {

using dtensor::state_of;

DTensor::DTensor(at::Tensor tensor) : tensor_(std::move(tensor)) {
  TORCH_CHECK_TYPE(is(tensor_), "this tensor is not a DTensor: fully_shard() or distribute_tensor() make one");
}

bool DTensor::is(const at::Tensor& tensor) { return state_of(tensor) != nullptr; }

const DeviceMesh& DTensor::device_mesh() const { return state_of(tensor_)->mesh; }

const Placements& DTensor::placements() const { return state_of(tensor_)->placements; }

at::Tensor DTensor::to_local() const {
  auto& state = *state_of(tensor_);
  state.is_lent = true;
  return state.local();
}

at::Tensor DTensor::full_tensor() const {
  auto& state = *state_of(tensor_);
  dtensor::reduce_partials({&state}, {"full_tensor", &state.path});
  dtensor::meet(state, "full_tensor of " + state.path);
  return dtensor::gather_full(state, tensor_.sizes());
}

}  // namespace fsdp
