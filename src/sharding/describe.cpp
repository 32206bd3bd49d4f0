#include <fsdp/dtensor.h>
#include <fsdp/fully_shard.h>

#include <sstream>

#include "dtensor/layout.h"
#include "sharding/module_tree.h"

namespace fsdp {

namespace {

void describe_tensor(std::ostream& out, const std::string& indent, const std::string& name, const at::Tensor& tensor,
                     bool is_buffer) {
  out << indent << "(" << name << "): ";
  if (!tensor.defined()) {
    out << "undefined\n";
    return;
  }
  out << tensor.sizes() << " " << c10::toString(tensor.scalar_type());
  if (const auto* state = dtensor::state_of(tensor)) {
    // The local shape from the layout: reading the shard could wait for something in flight.
    const auto extents = dtensor::own_extents(tensor.sizes(), state->mesh, state->placements);
    out << ", local [";
    for (size_t i = 0; i < extents.size(); ++i) out << (i ? ", " : "") << extents[i].size();
    out << "], " << to_string(state->placements);
  }
  if (is_buffer)
    out << ", buffer";
  else if (!tensor.requires_grad())
    out << ", frozen";
  out << "\n";
}

void describe_module(std::ostream& out, const std::string& indent, const torch::nn::Module& module) {
  out << (is_fsdp(module) ? "FSDP" : "") << sharding::type_name(module) << "(";
  const auto parameters = module.named_parameters(/*recurse=*/false);
  const auto buffers = module.named_buffers(/*recurse=*/false);
  const auto children = module.named_children();
  if (parameters.is_empty() && buffers.is_empty() && children.is_empty()) {
    out << ")\n";
    return;
  }
  out << "\n";
  const auto inner = indent + "  ";
  for (const auto& item : parameters) describe_tensor(out, inner, item.key(), item.value(), false);
  for (const auto& item : buffers) describe_tensor(out, inner, item.key(), item.value(), true);
  for (const auto& item : children) {
    out << inner << "(" << item.key() << "): ";
    describe_module(out, inner, *item.value());
  }
  out << indent << ")\n";
}

}  // namespace

std::string describe(const torch::nn::Module& module) {
  std::ostringstream out;
  describe_module(out, "", module);
  return out.str();
}

}  // namespace fsdp
