#include <fsdp/checkpoint_wrapper.h>
#include <fsdp/fully_shard.h>
#include <torch/nn/modules/container/sequential.h>

#include <map>
#include <set>

#include "sharding/module_tree.h"

namespace fsdp {

namespace {

using torch::nn::AnyModule;
using torch::nn::Module;
using torch::nn::SequentialImpl;

// A place in the tree where a matching module stands.
struct Place {
  Module* parent;
  std::string name;  // in its parent
  std::string path;
  std::shared_ptr<Module> module;
};

// Finds the places below a module.
class PlaceSearch {
 public:
  explicit PlaceSearch(const ModulePredicate& predicate) : predicate_(predicate) {}

  // Children before their parents, so that a wrapper takes over children that are wrapped already.
  void look_below(Module& module, const std::string& prefix) {
    if (!visited_.insert(&module).second) return;  // it stands in two places, and its children in one: in it
    for (const auto& child : module.named_children()) {
      if (dynamic_cast<CheckpointWrapperBase*>(child.value().get())) continue;  // wrapped before
      const auto path = prefix + child.key();
      look_below(*child.value(), path + ".");
      if (predicate_(*child.value())) places.push_back({&module, child.key(), path, child.value()});
    }
  }

  std::vector<Place> places;

 private:
  const ModulePredicate& predicate_;
  std::set<const Module*> visited_;
};

AnyModule* entry_of(const Place& place) {
  auto* sequential = place.parent->as<SequentialImpl>();
  if (!sequential) return nullptr;
  const auto found = std::find_if(sequential->begin(), sequential->end(),
                                  [&](const AnyModule& entry) { return entry.ptr() == place.module; });
  return found == sequential->end() ? nullptr : &*found;
}

void check_places(const std::vector<Place>& places) {
  std::string held_by_type;
  for (const auto& place : places) {
    TORCH_CHECK_VALUE(!is_fsdp(*place.module), "apply_activation_checkpointing: '", place.path,
                      "' was wrapped by fully_shard before; call apply_activation_checkpointing first");
    if (entry_of(place)) continue;
    held_by_type += "\n  " + place.path + ": a " + sharding::type_name(*place.module) + " in a " +
                    sharding::type_name(*place.parent);
  }
  TORCH_CHECK_VALUE(held_by_type.empty(),
                    "apply_activation_checkpointing can replace children of torch::nn::Sequential only; the modules "
                    "around these call them by their own type:",
                    held_by_type,
                    "\nHint: call fsdp::checkpoint(child, x) instead of child->forward(x) there, or hold an "
                    "fsdp::CheckpointWrapper. Nothing was changed");
}

}  // namespace

int64_t apply_activation_checkpointing(Module& model, const ModulePredicate& predicate,
                                       const CheckpointOptions& options) {
  TORCH_CHECK_VALUE(predicate, "apply_activation_checkpointing: the predicate is empty");
  PlaceSearch search(predicate);
  search.look_below(model, "");
  const auto& places = search.places;
  check_places(places);
  std::map<const Module*, std::shared_ptr<AnyCheckpointWrapper>> wrappers;  // a module in two places stays one
  for (const auto& place : places) {
    auto* entry = entry_of(place);
    auto& wrapper = wrappers[place.module.get()];
    if (!wrapper) wrapper = std::make_shared<AnyCheckpointWrapper>(*entry, options);
    *entry = AnyModule(wrapper);
    place.parent->replace_module(place.name, wrapper);
  }
  return static_cast<int64_t>(places.size());
}

}  // namespace fsdp
