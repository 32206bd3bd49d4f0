#include "sharding/unshard_node.h"

#include "sharding/runtime.h"

namespace fsdp::sharding {

UnshardNode::UnshardNode(std::shared_ptr<ParamGroup> group, std::vector<int> indices, torch::autograd::edge_list edges)
    : torch::autograd::Node(std::move(edges)), group_(std::move(group)), indices_(std::move(indices)) {}

torch::autograd::variable_list UnshardNode::apply(torch::autograd::variable_list&& grads) {
  if (at::GradMode::is_enabled()) {
    const bool differentiable =
        std::any_of(grads.begin(), grads.end(), [](const auto& g) { return g.defined() && g.requires_grad(); });
    TORCH_CHECK_NOT_IMPLEMENTED(!differentiable, "second derivatives through the sharded parameters ", group_->name(),
                                " are not supported yet: call backward() without create_graph, or take the gradient "
                                "with respect to inputs only");
  }
  const auto runtime = group_->runtime();
  return runtime->run_backward(*group_, *this, std::move(grads));
}

// The group refers to its node weakly; what is left of the node must not keep the group alive.
void UnshardNode::release_resources() {
  group_.reset();
  torch::autograd::Node::release_resources();
}

uint32_t UnshardNode::output_of(int index) const {
  const auto found = std::find(indices_.begin(), indices_.end(), index);
  return static_cast<uint32_t>(found - indices_.begin());
}

}  // namespace fsdp::sharding
