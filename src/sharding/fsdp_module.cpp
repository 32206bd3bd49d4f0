#include <c10/util/StringUtil.h>
#include <fsdp/call.h>
#include <fsdp/fsdp_module.h>

#include <cmath>

#include "sharding/module_tree.h"
#include "sharding/runtime.h"

namespace fsdp {

namespace {

using sharding::ModuleState;

// `visit` for the module, and with `recurse` for every wrapped module below it.
template <class Visit>
void for_each_module(const std::shared_ptr<ModuleState>& state, bool recurse, const Visit& visit) {
  visit(*state);
  const auto runtime = state->runtime.lock();
  if (!recurse || !runtime) return;
  for (const auto& other : runtime->modules())
    if (state->is_ancestor_of(*other)) visit(*other);
}

// "'weight' over 2 ranks, 'bias' whole on 2 ranks"
std::string describe_groups(const ModuleState& state) {
  std::vector<std::string> texts;
  for (const auto& group : state.live_groups()) {
    const auto& shape = group->mesh().shape();
    const auto where = group->is_whole()   ? c10::str("whole on ", shape[0], " ranks")
                       : shape.size() == 1 ? c10::str("over ", shape[0], " ranks")
                                           : c10::str("over ", shape[0], " replicas of ", shape[1], " shards");
    texts.push_back(c10::str("'", group->name(), "' ", where));
  }
  return c10::Join(", ", texts);
}

ModuleState::PrefetchList weak_list(const std::vector<FSDPModule>& modules) {
  ModuleState::PrefetchList list;
  for (const auto& module : modules) list.push_back(module.state());
  return list;
}

[[noreturn]] void refuse_streams(const char* name) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, name,
                              " has a meaning only with device streams and their communication libraries, ",
                              "which a CPU mesh does not have; it comes with the accelerators");
}

}  // namespace

void UnshardHandle::wait() {
  for (const auto& group : state_->live_groups()) group->runtime()->finish(*group);
}

FSDPModule FSDPModule::of(const torch::nn::Module& module) {
  auto state = sharding::module_state_of(module);
  TORCH_CHECK_VALUE(state, "FSDPModule::of(", sharding::type_name(module),
                    "): this module was not wrapped by fully_shard");
  return FSDPModule(std::move(state));
}

const MixedPrecisionPolicy& mixed_precision_policy(const torch::nn::Module& module) {
  return FSDPModule::of(module).state()->mp_policy;
}

UnshardHandle FSDPModule::unshard(bool async_op) {
  for (const auto& group : state_->live_groups()) group->runtime()->hold(*group, async_op);
  return UnshardHandle(state_);
}

void FSDPModule::reshard() {
  for (const auto& group : state_->live_groups()) group->runtime()->release(*group);
}

void FSDPModule::set_modules_to_forward_prefetch(const std::vector<FSDPModule>& modules) {
  state_->forward_prefetch = weak_list(modules);
}

void FSDPModule::set_modules_to_backward_prefetch(const std::vector<FSDPModule>& modules) {
  state_->backward_prefetch = weak_list(modules);
}

void FSDPModule::set_reshard_after_forward(bool reshard_after_forward, bool recurse) {
  for_each_module(state_, recurse, [&](ModuleState& state) { state.reshard_after_forward = reshard_after_forward; });
}

void FSDPModule::set_reshard_after_backward(bool reshard_after_backward, bool recurse) {
  for_each_module(state_, recurse, [&](ModuleState& state) { state.reshard_after_backward = reshard_after_backward; });
}

void FSDPModule::set_unshard_in_backward(bool unshard_in_backward) {
  state_->unshard_in_backward = unshard_in_backward;
}

void FSDPModule::set_is_last_backward(bool is_last_backward) {
  if (const auto runtime = state_->runtime.lock()) runtime->set_is_last_backward(is_last_backward);
}

void FSDPModule::reset_iter_state() {
  TORCH_CHECK(state_->is_root(), "reset_iter_state() of ", state_->type_name,
              ", which is not the root: call it on the outermost wrapped module");
  if (const auto runtime = state_->runtime.lock()) runtime->reset();
}

void FSDPModule::set_requires_gradient_sync(bool requires_gradient_sync, bool recurse) {
  for_each_module(state_, recurse, [&](ModuleState& state) {
    state.reduction.requires_gradient_sync = requires_gradient_sync;
    state.reduction.requires_all_reduce = requires_gradient_sync;
  });
}

void FSDPModule::set_requires_all_reduce(bool requires_all_reduce, bool recurse) {
  for_each_module(state_, recurse,
                  [&](ModuleState& state) { state.reduction.requires_all_reduce = requires_all_reduce; });
}

void FSDPModule::set_gradient_divide_factor(double factor) {
  TORCH_CHECK_VALUE(std::isfinite(factor) && factor > 0, "set_gradient_divide_factor(", factor,
                    "): a positive number is needed");
  state_->reduction.divide_factor = factor;
}

void FSDPModule::set_reduce_scatter_unused_params(bool reduce_unused, bool recurse) {
  for_each_module(state_, recurse, [&](ModuleState& state) { state.reduction.reduce_unused = reduce_unused; });
}

void FSDPModule::set_reduce_scatter_max_input_buffers(int64_t num_buffers, bool recurse) {
  TORCH_CHECK_VALUE(num_buffers >= 1, "set_reduce_scatter_max_input_buffers(", num_buffers, "): at least 1 is needed");
  for_each_module(state_, recurse,
                  [&](ModuleState& state) { state.reduction.max_in_flight = static_cast<size_t>(num_buffers); });
}

void FSDPModule::set_all_reduce_hook(std::function<void(const at::Tensor&)> hook) {
  TORCH_CHECK_VALUE(state_->groups.size() <= 1, "set_all_reduce_hook(): ", state_->type_name, " has ",
                    state_->groups.size(), " parameter groups (", describe_groups(*state_),
                    "), and a hook sees the gradients of one: wrap the module without replicate_below and without "
                    "meshes from shard_placement_fn, or split it into modules of one group each");
  state_->reduction.all_reduce_hook = std::move(hook);
}

void FSDPModule::set_force_sum_reduction_for_comms(bool /*force_sum*/) {}

void FSDPModule::set_post_optim_event() { refuse_streams("set_post_optim_event()"); }

void FSDPModule::set_separate_reduce_scatter_group(bool /*enable*/, bool /*recurse*/) {
  refuse_streams("set_separate_reduce_scatter_group()");
}

void FSDPModule::set_symm_mem_for_comm() { refuse_streams("set_symm_mem_for_comm()"); }

void FSDPModule::set_allocate_memory_from_process_group_for_comm(bool /*enable*/) {
  refuse_streams("set_allocate_memory_from_process_group_for_comm()");
}

void FSDPModule::set_custom_all_gather() { refuse_streams("set_custom_all_gather()"); }

void FSDPModule::set_custom_reduce_scatter() { refuse_streams("set_custom_reduce_scatter()"); }

void share_comm_ctx(const std::vector<FSDPModule>& /*modules*/) { refuse_streams("share_comm_ctx()"); }

}  // namespace fsdp
