#include "sharding/runtime.h"

#include <c10/util/hash.h>
#include <torch/csrc/autograd/engine.h>

#include "comm/log.h"
#include "sharding/pending_reduction.h"
#include "sharding/unshard_node.h"

namespace fsdp::sharding {

Runtime::Runtime(c10::Device device)
    : ledger_(std::make_shared<dtensor::Ledger>()), pool_(std::make_shared<BlockPool>(device)) {}

void Runtime::add_group(const std::shared_ptr<ParamGroup>& group) {
  group->set_runtime(shared_from_this(), static_cast<int>(groups_.size()));
  groups_.push_back(group);
}

void Runtime::add_module(const std::shared_ptr<ModuleState>& module) {
  module->runtime = weak_from_this();
  modules_.push_back(module);
}

void Runtime::absorb(Runtime& inner) {
  const std::scoped_lock lock(mutex_, inner.mutex_);
  dtensor::Ledger::merge(inner.ledger_, ledger_);
  is_last_backward_ = is_last_backward_ && inner.is_last_backward_;
  for (const auto& module : inner.modules_) add_module(module);
  for (const auto& weak : inner.groups_) {
    const auto group = weak.lock();
    if (!group) continue;
    group->drop_gather();
    group->reshard();
    add_group(group);
  }
  inner.groups_.clear();
  inner.modules_.clear();
}

std::shared_ptr<ModuleState> Runtime::find_module(const torch::nn::Module* address) const {
  const auto found = std::find_if(modules_.begin(), modules_.end(),
                                  [&](const auto& module) { return module->addresses.contains(address); });
  return found == modules_.end() ? nullptr : *found;
}

void Runtime::enter_pass() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == -1) {
    if (!backward_tasks_.empty()) end_backward();  // a backward ended by an exception
    if (in_forward_) return;
    in_forward_ = true;
    schedule_.begin_pass(Schedule::Kind::kForward);
    reduction_order_.begin_pass(Schedule::Kind::kForward);
    return;
  }
  if (std::find(backward_tasks_.begin(), backward_tasks_.end(), task) != backward_tasks_.end()) return;
  if (backward_tasks_.empty()) {
    in_forward_ = false;
    schedule_.begin_pass(Schedule::Kind::kBackward);
    reduction_order_.begin_pass(Schedule::Kind::kBackward);
  }
  backward_tasks_.push_back(task);
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), task] {
    const auto self = weak.lock();
    if (!self) return;
    const std::lock_guard lock(self->mutex_);
    if (self->backward_tasks_.size() == 1) self->reduce_leftovers();
    std::erase(self->backward_tasks_, task);
    if (self->backward_tasks_.empty()) self->end_backward();
  });
  if (backward_tasks_.size() == 1) prefetch_learnt();
}

template <class Visit>
void Runtime::for_each_group(const Visit& visit) const {
  for (const auto& weak : groups_)
    if (const auto group = weak.lock()) visit(*group);
}

// What backwards without gradient sync left in groups that this backward did not reach.
void Runtime::reduce_leftovers() {
  for_each_group([](ParamGroup& group) { group.reduce_leftovers(); });
}

void Runtime::end_backward() {
  backward_tasks_.clear();
  held_.clear();
  recorded_.clear();
  current_ = -1;
  if (!is_last_backward_) return;
  for_each_group([](ParamGroup& group) {
    group.drop_gather();
    if (group.module().reshard_after_backward) group.reshard();
  });
}

void Runtime::touch(c10::ArrayRef<dtensor::Owner*> owners, const dtensor::Reason& reason) {
  const std::lock_guard lock(mutex_);
  enter_pass();
  for (auto* owner : owners) {
    auto& group = static_cast<ParamGroup&>(*owner);
    if (group.is_resident()) {
      schedule_.touched(group.id(), at::GradMode::is_enabled());
    } else {
      gather(group, owners, reason);
    }
    if (!held_.empty()) std::erase(held_, group.id());
  }
}

void Runtime::check_off_meta(const ParamGroup& group, const dtensor::Reason& reason) const {
  if (group.paths_on_meta().empty()) return;
  std::vector<std::string> paths;
  for_each_group([&](const ParamGroup& other) {
    for (auto& path : other.paths_on_meta()) paths.push_back(std::move(path));
  });
  TORCH_CHECK(false, reason.str(), " needs values, but still on the meta device are: ", c10::Join(", ", paths),
              ". Call fsdp::materialize(module, device, init) first");
}

void Runtime::gather(ParamGroup& group, c10::ArrayRef<dtensor::Owner*> owners, const dtensor::Reason& reason) {
  check_off_meta(group, reason);
  const bool was_recorded = std::erase(recorded_, group.id()) > 0 && group.is_in_flight();
  if (!was_recorded) record(group, reason);
  evict(owners);
  group.finish_gather();
  current_ = group.id();
  prefetch_after(group);
}

// Enters a gather into the schedule. One that flies already was started by all ranks, as they predicted it or were told
// to prefetch it; so will be one that is predicted. Any other meets the other ranks first.
void Runtime::record(ParamGroup& group, const dtensor::Reason& reason) {
  const int id = group.id();
  const bool with_grad = at::GradMode::is_enabled();
  if (group.is_in_flight() || (schedule_.expects(id) && !schedule_.starts_pass(id))) {
    schedule_.touched(id, with_grad);
  } else {
    auto changed = schedule_;
    changed.touched(id, with_grad);
    if (!changed.expects(id)) group.meet_to_read(reason);
    schedule_ = std::move(changed);  // nothing is learnt where the other ranks did not come this way
  }
  schedule_.gathered(id);
}

bool Runtime::may_evict(const ParamGroup& group, c10::ArrayRef<dtensor::Owner*> owners) const {
  if (!group.has_block() || group.id() == current_ || is_held(group)) return false;
  if (!group.module().reshards_after_forward()) return false;
  return std::none_of(owners.begin(), owners.end(), [&](const dtensor::Owner* owner) {
    const auto& used = static_cast<const ParamGroup&>(*owner);
    return &used == &group || group.module().is_ancestor_of(used.module());
  });
}

void Runtime::evict(c10::ArrayRef<dtensor::Owner*> owners) {
  for_each_group([&](ParamGroup& group) {
    if (!may_evict(group, owners)) return;
    if (in_backward())
      group.reshard();
    else
      group.keep_part(group.module().num_ranks_after_forward());
  });
}

// What the module of `group` lists, or else what followed last time.
void Runtime::prefetch_after(const ParamGroup& group) {
  const auto& list = in_backward() ? group.module().backward_prefetch : group.module().forward_prefetch;
  if (!list) return prefetch_learnt();
  for (const auto& weak : *list) {
    const auto next = weak.lock();
    if (!next) continue;
    for (const auto& target : next->live_groups())
      if (target->runtime().get() == this && !target->is_resident()) target->launch_gather();
  }
}

void Runtime::prefetch_learnt() {
  const auto id = schedule_.next();
  if (!id) return;
  bool any_in_flight = false;
  for_each_group([&](const ParamGroup& other) { any_in_flight = any_in_flight || other.is_in_flight(); });
  const auto next = group(*id);
  if (any_in_flight || !next || next->is_resident()) return;  // one ahead
  if (in_backward() && !next->module().unshard_in_backward) return;
  next->launch_gather();
}

// A reduction that the last backward did not issue at this place meets the other ranks first: a rank that used another
// group than they did must hear of it before its collective meets theirs.
void Runtime::expect_reduction(const ParamGroup& group, const std::vector<int>& indices) {
  // The set of parameters belongs to it: it decides the size of what is sent.
  const int id = static_cast<int>(c10::get_hash(group.id(), indices) & 0x7fffffff);
  if (!reduction_order_.expects(id)) group.meet_to_reduce();
  reduction_order_.gathered(id);
}

torch::autograd::variable_list Runtime::run_backward(ParamGroup& group, const UnshardNode& node,
                                                     torch::autograd::variable_list grads) {
  const std::lock_guard lock(mutex_);
  enter_pass();
  group.forget(&node);
  if (group.module().reduction.requires_gradient_sync) expect_reduction(group, node.indices());
  auto reduced = group.reduce(node.indices(), std::move(grads));
  prefetch_learnt();
  return reduced;
}

at::Tensor Runtime::reduce_whole(ParamGroup& group, int index, const at::Tensor& grad) {
  const std::lock_guard lock(mutex_);
  enter_pass();
  TORCH_CHECK_NOT_IMPLEMENTED(group.module().reduction.requires_gradient_sync, "a custom autograd function got '",
                              group.path(index),
                              "' itself, which set_requires_gradient_sync(false) does not cover: give it a result of "
                              "an op on the parameter, such as parameter.view_as(parameter)");
  TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled() || !grad.requires_grad(),
                              "create_graph through a custom autograd function that got '", group.path(index),
                              "' itself: give it a result of an op on the parameter");
  expect_reduction(group, {index});
  return group.reduce({index}, {grad}).front();
}

void Runtime::track(const std::shared_ptr<PendingReduction>& reduction) { reductions_.push_back(reduction); }

void Runtime::make_room_for_reduction() {
  size_t most = 1;
  for (const auto& module : modules_) most = std::max(most, module->reduction.max_in_flight);
  while (reductions_.size() >= most) {
    const auto oldest = reductions_.front();
    reductions_.erase(reductions_.begin());
    oldest->wait();
  }
}

bool Runtime::is_held(const ParamGroup& group) const {
  return std::find(held_.begin(), held_.end(), group.id()) != held_.end();
}

void Runtime::hold(ParamGroup& group, bool async_op) {
  const std::lock_guard lock(mutex_);
  enter_pass();
  if (!group.is_resident()) {
    const std::string name = group.name();
    check_off_meta(group, {"unshard", &name});
    dtensor::Owner* owner = &group;
    if (async_op && !group.is_in_flight()) {
      record(group, {"unshard", &name});
      group.launch_gather();
      recorded_.push_back(group.id());
    } else if (!async_op) {
      gather(group, {&owner, 1}, {"unshard", &name});
    }
  }
  if (!is_held(group)) held_.push_back(group.id());
}

void Runtime::finish(ParamGroup& group) {
  const std::lock_guard lock(mutex_);
  if (group.is_in_flight()) group.finish_gather();
}

void Runtime::release(ParamGroup& group) {
  const std::lock_guard lock(mutex_);
  std::erase(held_, group.id());
  std::erase(recorded_, group.id());
  group.drop_gather();
  group.reshard();
}

void Runtime::reset() {
  const std::lock_guard lock(mutex_);
  backward_tasks_.clear();
  held_.clear();
  recorded_.clear();
  current_ = -1;
  in_forward_ = false;
  is_last_backward_ = true;
  schedule_.abandon_pass();
  reduction_order_.abandon_pass();
  // Nothing that still flies is wanted any more; whether it failed does not matter.
  const auto finish_quietly = [](const auto& wait) {
    try {
      wait();
    } catch (const std::exception& error) {
      comm::log_line(comm::LogLevel::kInfo, c10::str("reset_iter_state() drops: ", error.what()));
    }
  };
  for (const auto& reduction : std::exchange(reductions_, {})) finish_quietly([&] { reduction->wait(); });
  for_each_group([&](ParamGroup& group) {
    finish_quietly([&] { group.drop_gather(); });
    group.reshard();
    group.drop_leftovers();
    group.forget(nullptr);
  });
}

void Runtime::remember_collectives() const {
  for_each_group([](const ParamGroup& group) { group.remember_collectives(); });
}

void Runtime::set_is_last_backward(bool is_last_backward) {
  const std::lock_guard lock(mutex_);
  is_last_backward_ = is_last_backward;
}

}  // namespace fsdp::sharding
