#include "train/move_values.h"

#include "comm/collectives.h"
#include "dtensor/rank0.h"

namespace fsdp::train {

void copy_value(const at::Tensor& target, const at::Tensor& value) {
  const at::NoGradGuard no_grad;
  const auto* state = dtensor::state_of(target);
  if (state && state == dtensor::state_of(value)) return;
  target.copy_(value);
}

void send_value(const at::Tensor& target, const at::Tensor& value, const DeviceMesh& mesh, const std::string& name) {
  const at::NoGradGuard no_grad;
  if (auto* state = dtensor::state_of(target)) {
    dtensor::scatter_from_first_rank(*state, target.sizes(), value);
    target.unsafeGetTensorImpl()->bump_version();
    return;
  }
  if (value.defined()) target.copy_(value);
  const auto sent = target.detach().contiguous();
  for (int64_t mesh_dim = 0; mesh_dim < mesh.ndim(); ++mesh_dim)
    if (mesh.size(mesh_dim) > 1) comm::broadcast(sent, 0, mesh.get_group(mesh_dim), name).wait();
  if (!sent.is_alias_of(target)) target.copy_(sent);
}

}  // namespace fsdp::train
