#pragma once
// What fully_shard remembers of one wrapped module: its place in the tree and its group.
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace fsdp::sharding {

class ParamGroup;
class Runtime;

class ModuleState {
 public:
  const torch::nn::Module* address = nullptr;  // for look-ups; never dereferenced
  std::string type_name;
  std::set<const torch::nn::Module*> below;   // all submodules when it was wrapped; for look-ups too
  std::optional<bool> reshard_after_forward;  // as given
  std::weak_ptr<ModuleState> parent;          // the nearest wrapped ancestor
  std::weak_ptr<ParamGroup> group;            // empty when outer parameters were all claimed before
  std::weak_ptr<Runtime> runtime;

  [[nodiscard]] bool is_root() const { return parent.expired(); }
  // Children are resharded after forward, the root is not.
  [[nodiscard]] bool reshards_after_forward() const { return reshard_after_forward.value_or(!is_root()); }
  [[nodiscard]] bool is_ancestor_of(const ModuleState& other) const {
    for (auto up = other.parent.lock(); up; up = up->parent.lock())
      if (up.get() == this) return true;
    return false;
  }
};

}  // namespace fsdp::sharding
