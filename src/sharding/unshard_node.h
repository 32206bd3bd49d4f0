#pragma once
// The autograd nodes of a gather and of its derivative.
#include <torch/csrc/autograd/function.h>

#include "sharding/param_group.h"

namespace fsdp::sharding {

// Forward: nothing, the gathered tensors are its outputs. Backward: the reduce-scatter. The engine's dependency
// counting decides when all gradients of a group are there.
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
  void refuse_capture() const;
  void disconnect();

  std::shared_ptr<ParamGroup> group_;
  std::vector<int> indices_;
  bool is_disconnected_ = false;
};

// The reduce-scatter as an op of a graph (create_graph): its backward gathers.
class ReduceNode : public torch::autograd::Node {
 public:
  // Input k was the whole gradient of slot indices[k], output k is the sharded one.
  ReduceNode(std::shared_ptr<ParamGroup> group, std::vector<int> indices, torch::autograd::edge_list edges);

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
  void release_resources() override;
  [[nodiscard]] std::string name() const override { return "FSDPReduceBackward"; }

  // `reduced` become outputs of a new node over `grads`, where they were reduced from.
  static void connect(const std::shared_ptr<ParamGroup>& group, const std::vector<int>& indices,
                      const torch::autograd::edge_list& grads, torch::autograd::variable_list& reduced);

 private:
  std::shared_ptr<ParamGroup> group_;
  std::vector<int> indices_;
};

}  // namespace fsdp::sharding
