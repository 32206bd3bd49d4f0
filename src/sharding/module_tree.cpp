#include "sharding/module_tree.h"

namespace fsdp::sharding {

std::shared_ptr<ParamGroup> group_of(const at::Tensor& tensor) {
  const auto* state = dtensor::state_of(tensor);
  if (!state || !state->owner) return nullptr;
  return static_cast<ParamGroup*>(state->owner)->shared_from_this();
}

std::vector<std::shared_ptr<Runtime>> runtimes_below(const torch::nn::Module& module) {
  std::vector<std::shared_ptr<Runtime>> runtimes;
  for (const auto& parameter : module.parameters()) {
    const auto group = group_of(parameter);
    if (!group) continue;
    if (std::find(runtimes.begin(), runtimes.end(), group->runtime()) == runtimes.end())
      runtimes.push_back(group->runtime());
  }
  return runtimes;
}

std::shared_ptr<ModuleState> module_state_of(const torch::nn::Module& module) {
  for (const auto& runtime : runtimes_below(module))
    if (auto state = runtime->find_module(&module)) return state;
  return nullptr;
}

std::string type_name(const torch::nn::Module& module) {
  auto name = module.name();
  // Keep template arguments, drop namespaces in front of the class.
  const auto arguments = name.find('<');
  const auto scope = name.rfind("::", arguments == std::string::npos ? std::string::npos : arguments);
  if (scope != std::string::npos) name.erase(0, scope + 2);
  constexpr std::string_view kSuffix = "Impl";
  const auto end = std::min(name.find('<'), name.size());
  if (end > kSuffix.size() && std::string_view(name).substr(0, end).ends_with(kSuffix))
    name.erase(end - kSuffix.size(), kSuffix.size());
  return name;
}

}  // namespace fsdp::sharding
