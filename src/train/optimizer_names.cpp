#include "train/optimizer_names.h"

#include <set>

namespace fsdp::train {

OptimizerNames::OptimizerNames(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer) {
  const auto entries = entries_of(module);
  meshes_ = meshes_of(entries);
  std::unordered_map<const c10::TensorImpl*, std::string> first_names;
  for (const auto& entry : entries)
    if (!entry.is_buffer) first_names.emplace(entry.tensor.unsafeGetTensorImpl(), entry.name);
  std::set<std::string> held;
  for (const auto& group : optimizer.param_groups()) {
    auto& named = groups_.emplace_back();
    for (const auto& parameter : group.params()) {
      const auto found = first_names.find(parameter.unsafeGetTensorImpl());
      TORCH_CHECK_VALUE(found != first_names.end(), "parameter group ", groups_.size() - 1,
                        " of the optimizer holds at place ", named.size(), " a tensor of shape ", parameter.sizes(),
                        " that is no parameter of the module: pass the module that the optimizer was made for");
      named.push_back({found->second, parameter});
      held.insert(found->second);
    }
  }
  for (const auto& entry : entries) {
    const auto found = first_names.find(entry.tensor.unsafeGetTensorImpl());
    if (found != first_names.end() && held.contains(found->second)) canonical_.emplace(entry.name, found->second);
  }
}

const std::string* OptimizerNames::canonical(const std::string& name) const {
  const auto found = canonical_.find(name);
  return found == canonical_.end() ? nullptr : &found->second;
}

const torch::optim::OptimizerParamState* state_for(const torch::optim::Optimizer& optimizer,
                                                   const at::Tensor& parameter) {
  const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
  return found == optimizer.state().end() ? nullptr : found->second.get();
}

}  // namespace fsdp::train
