#pragma once
// The autograd nodes of a gather and of its derivative.
#include <torch/csrc/autograd/function.h>

#include "sharding/param_group.h"

namespace fsdp::sharding {

// A node of a group's parameters: input or output k belongs to slot indices[k]. The group refers to it weakly, and what
// is left of it once released does not keep the group alive.
class GroupNode : public torch::autograd::Node {
 public:
  GroupNode(std::shared_ptr<ParamGroup> group, std::vector<int> indices, torch::autograd::edge_list edges)
      : torch::autograd::Node(std::move(edges)), group_(std::move(group)), indices_(std::move(indices)) {}
  void release_resources() override;
  [[nodiscard]] const std::vector<int>& indices() const { return indices_; }

 protected:
  std::shared_ptr<ParamGroup> group_;
  std::vector<int> indices_;
};

// Forward: nothing, the gathered tensors are its outputs. Backward: the reduce-scatter. The engine's dependency
// counting decides when all gradients of a group are there.
class UnshardNode : public GroupNode {
 public:
  using GroupNode::GroupNode;  // output k is a gathered parameter; its gradient goes to edges[k]

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
  [[nodiscard]] std::string name() const override { return "FSDPUnshardBackward"; }

  // The output number of slot `index`.
  [[nodiscard]] uint32_t output_of(int index) const;

 private:
  void refuse_capture() const;
  void disconnect();

  bool is_disconnected_ = false;
};

// The reduce-scatter as an op of a graph (create_graph): its backward gathers.
class ReduceNode : public GroupNode {
 public:
  using GroupNode::GroupNode;  // input k was a whole gradient, output k is the sharded one

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
  [[nodiscard]] std::string name() const override { return "FSDPReduceBackward"; }

  // `reduced` become outputs of a new node over `grads`, where they were reduced from.
  static void connect(const std::shared_ptr<ParamGroup>& group, const std::vector<int>& indices,
                      const torch::autograd::edge_list& grads, torch::autograd::variable_list& reduced);
};

}  // namespace fsdp::sharding
