#pragma once
// The autograd node of a gather. Forward: nothing, the gathered tensors are its outputs. Backward: the reduce-scatter.
// The engine's dependency counting decides when all gradients of a group are there.
#include <torch/csrc/autograd/function.h>

#include "sharding/param_group.h"

namespace fsdp::sharding {

class UnshardNode : public torch::autograd::Node {
 public:
  // Output k is the gathered parameter in slot indices[k]; its gradient goes to edges[k].
  UnshardNode(std::shared_ptr<ParamGroup> group, std::vector<int> indices, torch::autograd::edge_list edges);

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
  void release_resources() override;
  [[nodiscard]] std::string name() const override { return "FSDPUnshardBackward"; }

  [[nodiscard]] const std::vector<int>& indices() const { return indices_; }
  // The output number of slot `index`.
  [[nodiscard]] uint32_t output_of(int index) const;

 private:
  std::shared_ptr<ParamGroup> group_;
  std::vector<int> indices_;
};

}  // namespace fsdp::sharding
