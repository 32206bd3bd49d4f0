#include "sharding/runtime.h"

#include <c10/util/hash.h>
#include <torch/csrc/autograd/engine.h>

namespace fsdp::sharding {

namespace {
// One flies while the next group computes; more would only cost memory.
constexpr size_t kMaxReductionsInFlight = 1;
}  // namespace

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
  const auto found =
      std::find_if(modules_.begin(), modules_.end(), [&](const auto& module) { return module->address == address; });
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
    std::erase(self->backward_tasks_, task);
    if (self->backward_tasks_.empty()) self->end_backward();
  });
  if (backward_tasks_.size() == 1) prefetch();
}

void Runtime::end_backward() {
  backward_tasks_.clear();
  held_.clear();
  current_ = -1;
  for (const auto& weak : groups_) {
    const auto group = weak.lock();
    if (!group) continue;
    group->drop_gather();
    group->reshard();
  }
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
  }
}

void Runtime::gather(ParamGroup& group, c10::ArrayRef<dtensor::Owner*> owners, const dtensor::Reason& reason) {
  meet_if_unexpected(group, reason);
  evict(owners);
  group.finish_gather();
  (void)schedule_.gathered(group.id());
  current_ = group.id();
  prefetch();
}

// A predicted gather is one that all ranks make: in flight already, or about to be launched.
void Runtime::meet_if_unexpected(ParamGroup& group, const dtensor::Reason& reason) {
  const bool with_grad = at::GradMode::is_enabled();
  if (schedule_.expects(group.id()) && !schedule_.starts_pass(group.id()))
    return schedule_.touched(group.id(), with_grad);
  auto changed = schedule_;
  changed.touched(group.id(), with_grad);
  if (!changed.expects(group.id())) group.meet_to_read(reason);
  schedule_ = std::move(changed);  // nothing is learnt where the other ranks did not come this way
}

bool Runtime::may_evict(const ParamGroup& group, c10::ArrayRef<dtensor::Owner*> owners) const {
  if (!group.has_block() || group.id() == current_ || is_held(group)) return false;
  const auto module = group.module();
  if (module && !module->reshards_after_forward()) return false;
  return std::none_of(owners.begin(), owners.end(), [&](const dtensor::Owner* owner) {
    const auto& used = static_cast<const ParamGroup&>(*owner);
    const auto used_module = used.module();
    return &used == &group || (module && used_module && module->is_ancestor_of(*used_module));
  });
}

void Runtime::evict(c10::ArrayRef<dtensor::Owner*> owners) {
  for (const auto& weak : groups_) {
    const auto group = weak.lock();
    if (group && may_evict(*group, owners)) group->reshard();
  }
}

void Runtime::prefetch() {
  const auto id = schedule_.next();
  if (!id) return;
  for (const auto& weak : groups_) {
    const auto other = weak.lock();
    if (other && other->is_in_flight()) return;  // one ahead
  }
  const auto next = group(*id);
  if (next && !next->is_resident()) next->launch_gather();
}

// A reduction that the last backward did not issue at this place meets the other ranks first: a rank that used another
// group than they did must hear of it before its collective meets theirs.
void Runtime::expect_reduction(const ParamGroup& group, const UnshardNode& node) {
  // The set of parameters belongs to it: it decides the size of what is sent.
  const int id = static_cast<int>(c10::get_hash(group.id(), node.indices()) & 0x7fffffff);
  if (!reduction_order_.expects(id)) group.meet_to_reduce();
  (void)reduction_order_.gathered(id);
}

torch::autograd::variable_list Runtime::run_backward(ParamGroup& group, const UnshardNode& node,
                                                     torch::autograd::variable_list grads) {
  const std::lock_guard lock(mutex_);
  enter_pass();
  group.forget(&node);
  expect_reduction(group, node);
  auto reduced = group.reduce(node.indices(), std::move(grads));
  prefetch();
  return reduced;
}

void Runtime::track(const std::shared_ptr<PendingReduction>& reduction) { reductions_.push_back(reduction); }

void Runtime::make_room_for_reduction() {
  while (reductions_.size() >= kMaxReductionsInFlight) {
    const auto oldest = reductions_.front();
    reductions_.erase(reductions_.begin());
    oldest->wait();
  }
}

bool Runtime::is_held(const ParamGroup& group) const {
  return std::find(held_.begin(), held_.end(), group.id()) != held_.end();
}

void Runtime::hold(ParamGroup& group) {
  const std::lock_guard lock(mutex_);
  const std::string name = group.name();
  dtensor::Owner* owner = &group;
  touch({&owner, 1}, {"unshard", &name});
  if (!is_held(group)) held_.push_back(group.id());
}

void Runtime::release(ParamGroup& group) {
  const std::lock_guard lock(mutex_);
  std::erase(held_, group.id());
  group.drop_gather();
  group.reshard();
}

}  // namespace fsdp::sharding
