#include <fsdp/dtensor.h>
#include <fsdp/fully_shard.h>

#include <set>

#include "dtensor/layout.h"
#include "sharding/module_tree.h"
#include "sharding/runtime.h"
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

// One runtime for the new root and all roots below it.
std::shared_ptr<Runtime> join_runtimes(const torch::nn::Module& module, const DeviceMesh& mesh) {
  const auto below = sharding::runtimes_below(module);
  auto runtime = std::make_shared<Runtime>(c10::Device(mesh.device_type()));
  for (const auto& inner : below) runtime->absorb(*inner);
  return runtime;
}

// `state` becomes the parent of every wrapped module below it that has none.
void link_tree(const std::shared_ptr<ModuleState>& state, const Runtime& runtime) {
  for (const auto& other : runtime.modules())
    if (other != state && other->parent.expired() && state->below.contains(other->address)) other->parent = state;
}

std::shared_ptr<ModuleState> make_state(const torch::nn::Module& module, const FullyShardOptions& options) {
  auto state = std::make_shared<ModuleState>();
  state->address = &module;
  state->type_name = sharding::type_name(module);
  state->reshard_after_forward = options.reshard_after_forward;
  for (const auto& child : module.modules(/*include_self=*/false)) state->below.insert(child.get());
  return state;
}

// A module's parameters belong to the wrapped module that claimed them first: below one nothing is left to wrap.
void check_bottom_up(const torch::nn::Module& module) {
  for (const auto& runtime : sharding::runtimes_below(module))
    for (const auto& other : runtime->modules())
      TORCH_CHECK_VALUE(!other->below.contains(&module), "fully_shard(", sharding::type_name(module),
                        "): the module around it, ", other->type_name,
                        ", was wrapped before and holds its parameters; wrap bottom up, inner modules first");
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

}  // namespace

FSDPModule fully_shard(torch::nn::Module& module, const FullyShardOptions& options) {
  TORCH_CHECK(!c10::InferenceMode::is_enabled(),
              "fully_shard inside InferenceMode: sharded parameters must track versions; wrap outside of it");
  const auto name = sharding::type_name(module);
  TORCH_CHECK(!is_fsdp(module), "fully_shard(", name, "): this module was wrapped before; wrap it once");
  check_bottom_up(module);
  const auto mesh = sharding::checked_mesh(options.mesh);
  const auto parameters = sharding::unclaimed_parameters(module, mesh);
  sharding::check_same_start(parameters, mesh, name, /*compare_values=*/!options.sync_init);
  if (options.sync_init) sharding::broadcast_start(parameters, module, mesh);

  const auto runtime = join_runtimes(module, mesh);
  const auto state = make_state(module, options);
  runtime->add_module(state);
  link_tree(state, *runtime);
  if (!parameters.empty()) {
    const auto group = ParamGroup::create(parameters, mesh, runtime);
    group->set_module(state);
    state->group = group;
    for (const auto& parameter : parameters) shard_gradient(parameter.tensor);
  }
  rename_parameters(module);
  return FSDPModule(state);
}

bool is_fsdp(const torch::nn::Module& module) { return sharding::module_state_of(module) != nullptr; }

FSDPModule FSDPModule::of(const torch::nn::Module& module) {
  auto state = sharding::module_state_of(module);
  TORCH_CHECK_VALUE(state, "FSDPModule::of(", sharding::type_name(module),
                    "): this module was not wrapped by fully_shard");
  return FSDPModule(std::move(state));
}

void FSDPModule::unshard() {
  if (const auto group = state_->group.lock()) group->runtime()->hold(*group);
}

void FSDPModule::reshard() {
  if (const auto group = state_->group.lock()) group->runtime()->release(*group);
}

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
