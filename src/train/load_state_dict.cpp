// Loading a state dict: first every rank finds out what fits and all agree, then values move.
#include <fsdp/dtensor.h>
#include <fsdp/state_dict.h>

#include <set>
#include <sstream>

#include "mesh/sequence_scope.h"
#include "sharding/module_tree.h"
#include "train/load_plan.h"
#include "train/move_values.h"

namespace fsdp {

namespace {

using train::ModuleEntry;

struct LoadPlan {
  IncompatibleKeys keys = {};
  std::vector<ModuleEntry> targets = {};  // in the module's order
  std::vector<std::string> wrong = {};    // "layers.0.weight is [3, 2], the given value [2, 2]"
  bool strict = true;

  [[nodiscard]] std::string complaint() const;
};

std::string misfit_of(const ModuleEntry& entry, const at::Tensor& value, bool must_be_whole) {
  if (!value.defined()) return entry.name + " is given as an undefined tensor";
  if (value.sizes() != entry.tensor.sizes())
    return c10::str(entry.name, " is ", entry.tensor.sizes(), ", the given value ", value.sizes());
  if (value.layout() != at::kStrided)
    return c10::str(entry.name, " is given as a tensor of layout ", value.layout(), "; call to_dense() on it");
  if (value.is_complex() && !entry.tensor.is_complex())
    return c10::str(entry.name, " is ", entry.tensor.scalar_type(), ", the given value ", value.scalar_type());
  if (value.is_meta()) return entry.name + " is given on the meta device, without values";
  if (must_be_whole && DTensor::is(value))
    return entry.name + " is given as a DTensor, where rank 0 passes whole tensors";
  return "";
}

LoadPlan plan_load(const std::vector<ModuleEntry>& entries, const StateDict& weights,
                   const LoadStateDictOptions& options) {
  LoadPlan plan{.strict = options.strict};
  std::set<std::string> names;
  for (const auto& entry : entries) {
    names.insert(entry.name);
    const auto* value = weights.find(entry.name);
    if (!value) {
      plan.keys.missing_keys.push_back(entry.name);
      continue;
    }
    auto misfit = misfit_of(entry, *value, /*must_be_whole=*/options.broadcast_from_rank0);
    if (!misfit.empty()) plan.wrong.push_back(std::move(misfit));
    plan.targets.push_back(entry);
  }
  for (const auto& item : weights)
    if (!names.contains(item.key())) plan.keys.unexpected_keys.push_back(item.key());
  return plan;
}

std::string LoadPlan::complaint() const {
  std::vector<std::string> complaints;
  const auto& [missing, unexpected] = keys;
  if (strict && !missing.empty()) complaints.push_back("missing: " + train::listed(missing));
  if (strict && !unexpected.empty()) complaints.push_back("unexpected: " + train::listed(unexpected));
  if (!wrong.empty()) complaints.push_back("wrong: " + train::listed(wrong));
  return c10::Join("; ", complaints);
}

// The plan of the first rank as text, one line a name, and back. Other ranks look the names up in their own module.
std::string text_of_plan(const LoadPlan& plan) {
  std::ostringstream text;
  for (const auto& target : plan.targets) text << "+" << target.name << "\n";
  for (const auto& name : plan.keys.missing_keys) text << "-" << name << "\n";
  for (const auto& name : plan.keys.unexpected_keys) text << "?" << name << "\n";
  return text.str();
}

LoadPlan plan_from_text(const std::vector<ModuleEntry>& entries, const std::string& text, bool strict) {
  LoadPlan plan{.strict = strict};
  std::set<std::string> wanted;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const auto name = line.substr(1);
    if (line[0] == '+') wanted.insert(name);
    if (line[0] == '-') plan.keys.missing_keys.push_back(name);
    if (line[0] == '?') plan.keys.unexpected_keys.push_back(name);
  }
  for (const auto& entry : entries)
    if (wanted.erase(entry.name) > 0) plan.targets.push_back(entry);
  for (const auto& name : wanted) plan.wrong.push_back(name + " is in rank 0's module only");
  return plan;
}

}  // namespace

IncompatibleKeys load_state_dict(torch::nn::Module& module, const StateDict& weights,
                                 const LoadStateDictOptions& options) {
  const auto title = "load_state_dict(" + sharding::type_name(module) + ")";
  const auto entries = train::entries_of(module);
  train::check_off_meta(entries, title);
  for (const auto& entry : entries) mesh::check_not_split(entry.tensor, entry.name, title);
  const auto meshes = train::meshes_of(entries);
  const bool from_rank0 = options.broadcast_from_rank0;
  const auto plan = train::agree_on_plan<LoadPlan>(
      title, meshes, from_rank0,
      {.from_own = [&] { return plan_load(entries, weights, options); },
       .to_text = text_of_plan,
       .from_text = [&](const std::string& text) { return plan_from_text(entries, text, options.strict); }});
  const bool has_values = train::has_values_to_load(meshes, from_rank0);
  for (const auto& target : plan.targets) {
    const auto value = has_values ? weights[target.name] : at::Tensor();
    if (from_rank0) {
      train::send_value(target.tensor, value, meshes.front(), target.name);
    } else {
      train::copy_value(target.tensor, value);
    }
  }
  return plan.keys;
}

}  // namespace fsdp
