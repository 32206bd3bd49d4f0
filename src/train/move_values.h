#pragma once
// Writes given values into the tensors of a module or an optimizer, in place.
#include <fsdp/device_mesh.h>

namespace fsdp::train {

// `value` is whole or a DTensor of any layout. Nothing happens when both are handles of one tensor.
void copy_value(const at::Tensor& target, const at::Tensor& value);

// `value` is whole and on the mesh's first rank only, undefined elsewhere; `target` is sharded or whole. Collective.
void send_value(const at::Tensor& target, const at::Tensor& value, const DeviceMesh& mesh, const std::string& name);

}  // namespace fsdp::train
