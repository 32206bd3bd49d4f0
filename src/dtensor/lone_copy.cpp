#include "dtensor/lone_copy.h"

#include <c10/core/Allocator.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "comm/collectives.h"
#include "comm/group_state.h"
#include "comm/meeting.h"
#include "dtensor/gather.h"
#include "dtensor/layout.h"

namespace fsdp::dtensor {

namespace {

// Reading a sharded leaf in a graph: the gradient is averaged over the mesh and cut as the leaf is.
class GatherNode : public torch::autograd::Node {
 public:
  GatherNode(std::shared_ptr<ShardState> state, const at::Tensor& handle, torch::autograd::edge_list edges)
      : torch::autograd::Node(std::move(edges)), state_(std::move(state)), sizes_(handle.sizes().vec()) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const auto& grad = grads[0];
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled() || !grad.defined() || !grad.requires_grad(),
                                "create_graph through ", state_->path,
                                ", a sharded tensor that is no parameter: its gradient is no part of a "
                                "graph. Through sharded parameters second derivatives work, third ones do not");
    meet_over_mesh(grad.defined() ? "reduce" : "skip");
    if (!grad.defined()) return {at::Tensor()};
    const PlainScope plain;
    auto mean = grad.clone(at::MemoryFormat::Contiguous);
    for (int64_t mesh_dim = 0; mesh_dim < state_->mesh.ndim(); ++mesh_dim) {
      const auto group = state_->mesh.get_group(mesh_dim);
      comm::all_reduce({mean}, group, "gradient of " + state_->path).front().wait();
    }
    mean.div_(state_->mesh.size());
    const auto own = own_part(mean, sizes_, state_->mesh, state_->placements).clone();
    return {make_like(*state_, sizes_, own, "gradient of " + state_->path)};
  }
  std::string name() const override { return "FSDPGatherBackward"; }

 private:
  // Nothing says that all ranks run this backward, or that the gradient reaches it on all.
  void meet_over_mesh(const char* intent) const {
    const auto what = std::string(intent) + " the gradient of " + state_->path;
    for (int64_t mesh_dim = 0; mesh_dim < state_->mesh.ndim(); ++mesh_dim)
      comm::meeting_of(state_->mesh.get_group(mesh_dim))->meet_to(what);
  }

  std::shared_ptr<ShardState> state_;
  std::vector<int64_t> sizes_;
};

c10::DataPtr bytes_of(const at::Tensor& tensor) {
  return c10::InefficientStdFunctionContext::makeDataPtr(
      tensor.mutable_data_ptr(), [tensor](void*) {}, tensor.device());
}

}  // namespace

void LoneCopy::touch(c10::ArrayRef<Owner*>, const Reason& reason) {
  const auto version = state_->local()._version();
  if (full_.defined() && static_cast<uint32_t>(version) == version_) return;
  meet(*state_, reason.str());
  full_ = gather_full(*state_, sizes_);
  version_ = static_cast<uint32_t>(version);
  if (const auto storage = storage_.lock()) storage->fill(bytes_of(full_), full_.nbytes());
}

at::Tensor LoneCopy::gathered(int index, const at::Tensor& handle) {
  auto storage = storage_.lock();
  if (!storage) {
    storage = c10::make_intrusive<GatheredStorage>(shared_from_this(), index, full_.nbytes(), bytes_of(full_));
    storage_ = storage;
  }
  auto tensor = make_gathered(std::move(storage), handle, full_.scalar_type());
  if (!at::GradMode::is_enabled() || !handle.requires_grad()) return tensor;
  auto node = c10::make_intrusive<GatherNode>(state_, handle, torch::autograd::collect_next_edges(handle));
  torch::autograd::create_gradient_edge(tensor, std::move(node));
  return tensor;
}

void LoneCopy::write_back(int) {
  const PlainScope plain;
  auto local = state_->local();
  local.copy_(own_part(full_, sizes_, state_->mesh, state_->placements));
  version_ = static_cast<uint32_t>(local._version());
}

Precision LoneCopy::precision(int) const {
  Precision own{full_.scalar_type()};
  if (state_->owner && !is_exact_) own.compute_dtype = state_->owner->precision(state_->index).compute_dtype;
  return own;
}

void LoneCopy::replaced(int) { full_ = at::Tensor(); }

}  // namespace fsdp::dtensor
