#pragma once
// The parameters of an optimizer under the names they have in a module.
#include <fsdp/optimizer_state_dict.h>

#include "train/module_entries.h"

namespace fsdp::train {

struct NamedState {
  std::string name;
  at::Tensor parameter;
};

class OptimizerNames {
 public:
  // Errors: c10::ValueError for a tensor of the optimizer that is no parameter of the module.
  OptimizerNames(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer);

  // One list a parameter group, in the optimizer's order.
  [[nodiscard]] const std::vector<std::vector<NamedState>>& groups() const { return groups_; }
  // The name used here of a parameter that `name` is one of the names of; null when the optimizer does not hold it.
  [[nodiscard]] const std::string* canonical(const std::string& name) const;
  [[nodiscard]] const std::vector<DeviceMesh>& meshes() const { return meshes_; }

 private:
  std::vector<std::vector<NamedState>> groups_;
  std::unordered_map<std::string, std::string> canonical_;
  std::vector<DeviceMesh> meshes_;
};

// The optimizer's state of a parameter; null when it has none.
[[nodiscard]] const torch::optim::OptimizerParamState* state_for(const torch::optim::Optimizer& optimizer,
                                                                 const at::Tensor& parameter);

}  // namespace fsdp::train
