#pragma once
// What fully_shard remembers of one wrapped module (or of several wrapped as one): its place in the tree, its groups,
// and the settings that FSDPModule changes.
#include <fsdp/fully_shard.h>

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace fsdp::sharding {

class ParamGroup;
class Runtime;

// How gradients are reduced.
struct ReductionSettings {
  bool requires_gradient_sync = true;
  bool requires_all_reduce = true;
  bool reduce_unused = false;
  size_t max_in_flight = 1;  // reductions of the root; the largest of its modules counts
  std::optional<double> divide_factor;
  std::function<void(const at::Tensor&)> all_reduce_hook;
};

class ModuleState {
 public:
  std::set<const torch::nn::Module*> addresses;  // for look-ups; never dereferenced
  std::set<const torch::nn::Module*> below;      // all submodules when it was wrapped; for look-ups too
  std::string type_name;
  std::weak_ptr<ModuleState> parent;              // the nearest wrapped ancestor
  std::vector<std::weak_ptr<ParamGroup>> groups;  // empty when its parameters were all claimed before
  std::weak_ptr<Runtime> runtime;

  ReshardAfterForward reshard_after_forward;  // as given, or as set later
  bool reshard_after_backward = true;
  bool unshard_in_backward = true;
  using PrefetchList = std::vector<std::weak_ptr<ModuleState>>;
  std::optional<PrefetchList> forward_prefetch;  // unset: what was learnt
  std::optional<PrefetchList> backward_prefetch;
  ReductionSettings reduction;
  MixedPrecisionPolicy mp_policy;

  [[nodiscard]] std::vector<std::shared_ptr<ParamGroup>> live_groups() const {
    std::vector<std::shared_ptr<ParamGroup>> live;
    for (const auto& weak : groups)
      if (auto group = weak.lock()) live.push_back(std::move(group));
    return live;
  }
  [[nodiscard]] bool is_root() const { return parent.expired(); }
  // Over how many ranks parameters stay sharded after forward; ReshardAfterForward::kAll: all of them.
  [[nodiscard]] int64_t num_ranks_after_forward() const { return reshard_after_forward.num_ranks(is_root()); }
  [[nodiscard]] bool reshards_after_forward() const { return num_ranks_after_forward() != 1; }
  [[nodiscard]] bool is_ancestor_of(const ModuleState& other) const {
    for (auto up = other.parent.lock(); up; up = up->parent.lock())
      if (up.get() == this) return true;
    return false;
  }
};

}  // namespace fsdp::sharding
