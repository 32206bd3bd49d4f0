#include <c10/util/StringUtil.h>
#include <fsdp/dtensor.h>
#include <fsdp/fully_shard.h>

#include <set>

#include "comm/log.h"
#include "dtensor/layout.h"
#include "sharding/collect.h"
#include "sharding/data_parallel_mesh.h"
#include "sharding/module_tree.h"
#include "sharding/runtime.h"
#include "sharding/wrap.h"
#include "sharding/wrap_checks.h"

namespace fsdp {

namespace {

using sharding::ModuleState;
using sharding::NamedParameter;
using sharding::ParamGroup;
using sharding::Runtime;

// Gradients that exist already are cut like their parameters, so that the next backward adds shards to shards.
void shard_gradient(const at::Tensor& parameter) {
  const auto& grad = parameter.grad();
  if (!grad.defined() || DTensor::is(grad)) return;
  const dtensor::PlainScope plain;
  const auto& state = *dtensor::state_of(parameter);
  const auto own = dtensor::own_part(grad, parameter.sizes(), state.mesh, state.placements).clone();
  parameter.mutable_grad() = dtensor::make_like(state, parameter.sizes(), own, "gradient of " + state.path);
}

// A custom autograd function that is given the parameter itself answers with a whole gradient, which no node of the
// group has reduced.
void watch_gradient(const at::Tensor& parameter) {
  if (!at::isFloatingType(parameter.scalar_type()) && !at::isComplexType(parameter.scalar_type())) return;
  const std::weak_ptr<ParamGroup> weak = sharding::group_of(parameter);
  const int index = dtensor::state_of(parameter)->index;
  const bool trains = parameter.requires_grad();
  parameter.set_requires_grad(true);  // hooks stay when it is frozen
  parameter.register_hook([weak, index](const at::Tensor& grad) -> at::Tensor {
    const auto group = weak.lock();
    if (!group || !grad.defined() || DTensor::is(grad)) return grad;
    return group->runtime()->reduce_whole(*group, index, grad);
  });
  parameter.set_requires_grad(trains);
}

// One runtime for the new root and all roots below it.
std::shared_ptr<Runtime> join_runtimes(const std::vector<torch::nn::Module*>& modules, const DeviceMesh& mesh) {
  auto runtime = std::make_shared<Runtime>(c10::Device(mesh.device_type()));
  for (const auto* module : modules)
    for (const auto& inner : sharding::runtimes_below(*module))
      if (inner != runtime) runtime->absorb(*inner);
  return runtime;
}

// `state` becomes the parent of every wrapped module below it that has none.
void link_tree(const std::shared_ptr<ModuleState>& state, const Runtime& runtime) {
  for (const auto& other : runtime.modules()) {
    const bool is_below = std::any_of(other->addresses.begin(), other->addresses.end(),
                                      [&](const auto* address) { return state->below.contains(address); });
    if (other != state && other->parent.expired() && is_below) other->parent = state;
  }
}

std::shared_ptr<ModuleState> make_state(const std::vector<torch::nn::Module*>& modules, const std::string& name,
                                        const FullyShardOptions& options) {
  auto state = std::make_shared<ModuleState>();
  state->type_name = name;
  state->reshard_after_forward = options.reshard_after_forward;
  state->mp_policy = options.mp_policy;
  for (const auto* module : modules) {
    state->addresses.insert(module);
    for (const auto& child : module->modules(/*include_self=*/false)) state->below.insert(child.get());
  }
  return state;
}

// A module's parameters belong to the wrapped module that claimed them first: below one nothing is left to wrap.
void check_bottom_up(const torch::nn::Module& module, const std::string& title) {
  for (const auto& runtime : sharding::runtimes_below(module))
    for (const auto& other : runtime->modules())
      TORCH_CHECK_VALUE(!other->below.contains(&module), title, ": the module around it, ", other->type_name,
                        ", was wrapped before and holds its parameters; wrap bottom up, inner modules first");
}

std::string names_of(const std::vector<torch::nn::Module*>& modules) {
  std::vector<std::string> names;
  for (const auto* module : modules) names.push_back(sharding::type_name(*module));
  return c10::Join(", ", names);
}

// Parameters over the same mesh make one group (whole ones another), in the order in which they come up.
void make_groups(const char* caller, const std::shared_ptr<ModuleState>& state,
                 const std::vector<NamedParameter>& parameters, const std::shared_ptr<Runtime>& runtime) {
  std::vector<std::vector<NamedParameter>> by_mesh;
  for (const auto& parameter : parameters) {
    const auto found = std::find_if(by_mesh.begin(), by_mesh.end(), [&](const auto& group) {
      return group.front().mesh == parameter.mesh && group.front().is_whole == parameter.is_whole;
    });
    if (found == by_mesh.end())
      by_mesh.push_back({parameter});
    else
      found->push_back(parameter);
  }
  for (const auto& members : by_mesh) {
    const auto group = ParamGroup::create(members, runtime, state);
    state->groups.push_back(group);
    for (const auto& parameter : members) {
      shard_gradient(parameter.tensor);
      watch_gradient(parameter.tensor);
    }
    comm::log_line(comm::LogLevel::kInfo,
                   c10::str(caller, "(", state->type_name, "): ", group->name(), ", ", group->shard_bytes(),
                            " bytes a rank over ", members.front().mesh.size(), " ranks"));
  }
}

// Paths as seen from the outermost wrapped module.
void rename_parameters(const torch::nn::Module& module) {
  std::set<const dtensor::ShardState*> seen;
  for (const auto& item : module.named_parameters()) {
    const auto* state = dtensor::state_of(item.value());
    const auto group = sharding::group_of(item.value());
    if (group && seen.insert(state).second) group->rename(state->index, item.key());
  }
}

// Once all ranks agree on what is whole: over all ranks of the mesh. Decided by the options alone, because every rank
// of the default group takes part, also one that wraps another module.
void place_whole(std::vector<NamedParameter>& parameters, const FullyShardOptions& given, const DeviceMesh& checked) {
  const auto& dims = given.dp_mesh_dims;
  const auto mesh = sharding::replica_mesh(dims.empty() ? checked : given.mesh, dims);
  for (auto& parameter : parameters)
    if (parameter.is_whole) parameter.mesh = mesh;
}

// What the options mean on their mesh.
FullyShardOptions checked_options(const FullyShardOptions& given) {
  auto checked = given;
  checked.mesh = sharding::checked_mesh(sharding::data_parallel_mesh(given.mesh, given.dp_mesh_dims));
  if (sharding::replicates_only(given.dp_mesh_dims)) checked.replicate_below = sharding::kAllWhole;
  checked.reshard_after_forward = sharding::checked_reshard(given.reshard_after_forward, checked.mesh);
  sharding::check_offload(given.offload_policy, checked.mesh);
  return checked;
}

}  // namespace

FSDPModule sharding::wrap_modules(const char* caller, const std::vector<torch::nn::Module*>& modules,
                                  const FullyShardOptions& options) {
  TORCH_CHECK(!c10::InferenceMode::is_enabled(), caller,
              " inside InferenceMode: wrapped parameters must track versions; wrap outside of it");
  TORCH_CHECK_VALUE(!modules.empty(), caller, "({}): the list of modules is empty");
  const auto name = names_of(modules);
  for (const auto* module : modules) {
    const auto title = c10::str(caller, "(", sharding::type_name(*module), ")");
    TORCH_CHECK(!is_fsdp(*module), title, ": this module was wrapped before; wrap it once");
    check_bottom_up(*module, title);
  }
  const auto title = c10::str(caller, "(", name, ")");
  const auto checked = checked_options(options);
  auto parameters = sharding::unclaimed_parameters(modules, checked);
  sharding::check_reshard_of(parameters, checked.reshard_after_forward);
  sharding::check_same_structure(parameters, modules, title, checked);
  if (checked.replicate_below > 0) place_whole(parameters, options, checked.mesh);
  sharding::connect_neighbours(parameters, checked.reshard_after_forward);
  if (options.sync_init)
    sharding::broadcast_start(parameters, modules, checked.mesh);
  else
    sharding::compare_start(parameters, title);

  const auto runtime = join_runtimes(modules, checked.mesh);
  const auto state = make_state(modules, name, checked);
  runtime->add_module(state);
  link_tree(state, *runtime);
  make_groups(caller, state, parameters, runtime);
  for (const auto* module : modules) rename_parameters(*module);
  return FSDPModule(state);
}

FSDPModule fully_shard(torch::nn::Module& module, const FullyShardOptions& options) {
  return sharding::wrap_modules("fully_shard", {&module}, options);
}

FSDPModule fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
                       const FullyShardOptions& options) {
  return sharding::wrap_modules("fully_shard", sharding::pointers_to("fully_shard", modules), options);
}

std::vector<torch::nn::Module*> sharding::pointers_to(const char* caller,
                                                      const std::vector<std::shared_ptr<torch::nn::Module>>& modules) {
  std::vector<torch::nn::Module*> pointers;
  for (const auto& module : modules) {
    TORCH_CHECK_VALUE(module, caller, ": the list holds a null module");
    pointers.push_back(module.get());
  }
  return pointers;
}

bool is_fsdp(const torch::nn::Module& module) { return sharding::module_state_of(module) != nullptr; }

MemoryStats memory_stats(const torch::nn::Module& module) {
  const auto runtimes = sharding::runtimes_below(module);
  TORCH_CHECK_VALUE(!runtimes.empty(), "memory_stats(", sharding::type_name(module),
                    "): this module was not wrapped by fully_shard");
  TORCH_CHECK_VALUE(runtimes.size() == 1, "memory_stats(", sharding::type_name(module), "): the module holds ",
                    runtimes.size(), " roots that are sharded by themselves; ask each of them, or wrap the whole");
  return runtimes.front()->ledger()->read();
}

void reset_peak_memory_stats(const torch::nn::Module& module) {
  for (const auto& runtime : sharding::runtimes_below(module)) runtime->ledger()->reset_peaks();
}

}  // namespace fsdp
