#include "sharding/unshard_node.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include "sharding/runtime.h"

namespace fsdp::sharding {

using torch::autograd::edge_list;
using torch::autograd::variable_list;

namespace {
// Whether a backward over `grads` becomes part of a graph (create_graph).
bool makes_graph(const variable_list& grads) {
  return at::GradMode::is_enabled() &&
         std::any_of(grads.begin(), grads.end(), [](const auto& g) { return g.defined() && g.requires_grad(); });
}
}  // namespace

void GroupNode::release_resources() {
  group_.reset();
  torch::autograd::Node::release_resources();
}

variable_list UnshardNode::apply(variable_list&& grads) {
  const auto group = group_;  // the node may be released while it runs
  TORCH_CHECK(!is_disconnected_, "an earlier backward of this graph failed while ", group->name(),
              " kept its gradients on this rank: run the forward again");
  const bool syncs = group->module().reduction.requires_gradient_sync;
  if (!syncs) {
    refuse_capture();
    disconnect();
  }
  if (!makes_graph(grads)) return group->runtime()->run_backward(*group, *this, std::move(grads));

  TORCH_CHECK_NOT_IMPLEMENTED(syncs, "create_graph while set_requires_gradient_sync(false) holds for ", group->name(),
                              ": gradients kept on this rank are no part of a graph");
  const auto edges = torch::autograd::collect_next_edges(grads);
  auto reduced = group->runtime()->run_backward(*group, *this, std::move(grads));
  ReduceNode::connect(group, indices_, edges, reduced);
  return reduced;
}

// autograd::grad asks for the gradients themselves, and would say that the parameters were not used.
void UnshardNode::refuse_capture() const {
  const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
  if (!exec_info) return;
  for (size_t k = 0; k < next_edges_.size(); ++k) {
    const auto found = exec_info->find(next_edges_[k].function.get());
    TORCH_CHECK_NOT_IMPLEMENTED(
        found == exec_info->end() || !found->second.captures_, "autograd::grad of '", group_->path(indices_[k]),
        "' while set_requires_gradient_sync(false) holds for ", group_->name(),
        ": gradients that ranks keep for themselves cannot be returned. Hint: ", "call it with gradient sync on");
  }
}

// Nothing goes to the parameters in this backward: hooks that wait for their gradients must not run.
void UnshardNode::disconnect() {
  auto self = c10::intrusive_ptr<UnshardNode>::reclaim_copy(this);
  const auto edges = next_edges_;
  for (auto& edge : next_edges_) edge = {};
  is_disconnected_ = true;
  torch::autograd::Engine::get_default_engine().queue_callback([self, edges] {  // the graph may be kept
    self->next_edges_ = edges;
    self->is_disconnected_ = false;
  });
}

uint32_t UnshardNode::output_of(int index) const {
  const auto found = std::find(indices_.begin(), indices_.end(), index);
  return static_cast<uint32_t>(found - indices_.begin());
}

variable_list ReduceNode::apply(variable_list&& grads) {
  TORCH_CHECK_NOT_IMPLEMENTED(!makes_graph(grads), "third derivatives through the sharded parameters ", group_->name(),
                              " are not supported: call the second backward() without create_graph");
  return group_->reduce_backward(indices_, grads);
}

void ReduceNode::connect(const std::shared_ptr<ParamGroup>& group, const std::vector<int>& indices,
                         const edge_list& grads, variable_list& reduced) {
  auto node = c10::make_intrusive<ReduceNode>(group, indices, grads);
  for (const auto& output : reduced) {
    const auto number = output.defined() ? node->add_input_metadata(output)
                                         : node->add_input_metadata(torch::autograd::Node::undefined_input());
    if (output.defined()) torch::autograd::impl::set_gradient_edge(output, {node, number});
  }
}

}  // namespace fsdp::sharding
