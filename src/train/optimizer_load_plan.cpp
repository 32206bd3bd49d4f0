#include "train/optimizer_load_plan.h"

#include <fsdp/dtensor.h>

#include <set>

namespace fsdp::train {

OptimizerLoadPlan::OptimizerLoadPlan(const OptimizerNames& names, const OptimizerKind& kind,
                                     const OptimizerStateDict& dict, const Rules& rules)
    : names_(names), kind_(kind), rules_(rules) {
  match_states(dict);
  match_groups(dict);
}

void OptimizerLoadPlan::match_states(const OptimizerStateDict& dict) {
  std::unordered_map<std::string, const Values*> given;
  for (const auto& item : dict.state) {
    const auto* name = names_.canonical(item.key());
    if (name) given.emplace(*name, &item.value());
    if (!name && rules_.strict) complaints_.push_back("unexpected: " + item.key());
  }
  for (const auto& group : names_.groups()) {
    for (const auto& target : group) {
      const auto found = given.find(target.name);
      if (found != given.end()) {
        check_values(target, *found->second);
        items_.push_back({target, found->second});
      } else if (rules_.strict) {
        complaints_.push_back("missing: " + target.name);
      }
    }
  }
}

void OptimizerLoadPlan::check_values(const NamedState& target, const Values& values) {
  const auto complaint = kind_.complaint_about_state(values);
  if (!complaint.empty()) complaints_.push_back(c10::str("state of ", target.name, ": ", complaint));
  for (const auto& item : values) {
    if (!rules_.has_tensors || !item.value().isTensor()) continue;
    const auto& tensor = item.value().toTensor();
    const auto what = c10::str("'", item.key(), "' of ", target.name);
    if (!tensor.defined() || tensor.is_meta())
      complaints_.push_back(what + " has no values");
    else if (tensor.layout() != at::kStrided)
      complaints_.push_back(c10::str(what, " is given as a tensor of layout ", tensor.layout()));
    else if (tensor.sizes() != target.parameter.sizes())
      complaints_.push_back(
          c10::str(what, " is given as ", tensor.sizes(), " for a parameter of shape ", target.parameter.sizes()));
    else if (rules_.whole_only && DTensor::is(tensor))
      complaints_.push_back(what + " is given as a DTensor, where rank 0 passes whole tensors");
  }
}

void OptimizerLoadPlan::match_groups(const OptimizerStateDict& dict) {
  std::unordered_map<std::string, size_t> group_of;
  for (size_t g = 0; g < dict.param_groups.size(); ++g)
    for (const auto& name : dict.param_groups[g].params)
      if (const auto* canonical = names_.canonical(name)) group_of.emplace(*canonical, g);
  std::set<size_t> used;
  for (const auto& group : names_.groups()) {
    std::set<size_t> found;
    for (const auto& target : group) {
      const auto place = group_of.find(target.name);
      if (place != group_of.end()) found.insert(place->second);
      if (place == group_of.end() && rules_.strict) complaints_.push_back("in no parameter group: " + target.name);
    }
    options_.push_back(found.empty() ? nullptr : &dict.param_groups[*found.begin()].options);
    const bool is_cut = found.size() > 1 || (!found.empty() && !used.insert(*found.begin()).second);
    if (is_cut) complaints_.push_back("parameter groups are cut differently around " + group.front().name);
    if (!options_.back()) continue;
    const auto complaint = kind_.complaint_about_options(*options_.back());
    if (!complaint.empty())
      complaints_.push_back(c10::str("options of the group of ", group.front().name, ": ", complaint));
  }
}

}  // namespace fsdp::train
