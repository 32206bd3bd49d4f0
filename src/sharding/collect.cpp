#include "sharding/collect.h"

#include <fsdp/module_wrapper.h>
#include <torch/nn/modules.h>

#include <set>

#include "sharding/wrap_checks.h"

namespace fsdp::sharding {

namespace {

// The tensors that a module of LibTorch keeps as members beside its registry.
template <class Impl>
bool add_members(const torch::nn::Module& module, std::vector<std::pair<const char*, at::Tensor>>& members) {
  const auto* known = module.as<Impl>();
  if (!known) return false;
  if constexpr (requires { known->weight; }) members.emplace_back("weight", known->weight);
  if constexpr (requires { known->bias; }) members.emplace_back("bias", known->bias);
  return true;
}

std::vector<std::pair<const char*, at::Tensor>> known_members(const torch::nn::Module& module) {
  namespace nn = torch::nn;
  std::vector<std::pair<const char*, at::Tensor>> members;
  (void)(add_members<nn::LinearImpl>(module, members) || add_members<nn::BilinearImpl>(module, members) ||
         add_members<nn::EmbeddingImpl>(module, members) || add_members<nn::EmbeddingBagImpl>(module, members) ||
         add_members<nn::LayerNormImpl>(module, members) || add_members<nn::GroupNormImpl>(module, members) ||
         add_members<nn::BatchNorm1dImpl>(module, members) || add_members<nn::BatchNorm2dImpl>(module, members) ||
         add_members<nn::BatchNorm3dImpl>(module, members) || add_members<nn::Conv1dImpl>(module, members) ||
         add_members<nn::Conv2dImpl>(module, members) || add_members<nn::Conv3dImpl>(module, members) ||
         add_members<nn::ConvTranspose1dImpl>(module, members) ||
         add_members<nn::ConvTranspose2dImpl>(module, members) ||
         add_members<nn::ConvTranspose3dImpl>(module, members) || add_members<nn::PReLUImpl>(module, members));
  return members;
}

// forward() reads the member, the registry holds another tensor: training would do nothing.
void check_members(const std::string& prefix, const torch::nn::Module& module) {
  const auto registered = module.named_parameters(/*recurse=*/false);
  for (const auto& [name, member] : known_members(module)) {
    const auto* entry = registered.find(name);
    if (!entry) continue;
    TORCH_CHECK_VALUE(entry->is_same(member), "parameter '", prefix, name,
                      "' was replaced: the module's member and its registered parameter are two tensors. Assign values "
                      "with copy_() under torch::NoGradGuard, or register the new tensor before wrapping");
  }
}

void check_parameter(const std::string& path, const at::Tensor& parameter) {
  TORCH_CHECK(!parameter.is_inference(), "parameter '", path,
              "' was made in InferenceMode and does not track versions; build the module outside of it");
  TORCH_CHECK_VALUE(parameter.dim() > 0, "parameter '", path,
                    "' is a scalar (0-dim), which cannot be cut; make it a 1-D tensor of one element");
  TORCH_CHECK_NOT_IMPLEMENTED(parameter.layout() == at::kStrided && parameter.is_contiguous(), "parameter '", path,
                              "' is not contiguous (strides ", parameter.strides(),
                              "); call contiguous() on it before wrapping");
  TORCH_CHECK_VALUE(parameter.numel() > 0, "parameter '", path, "' has no elements: shape ", parameter.sizes());
}

// A group's shards are one block of memory.
void check_meta_is_all_or_none(const std::vector<NamedParameter>& parameters) {
  const auto is_meta = [](const NamedParameter& parameter) { return parameter.tensor.is_meta(); };
  const auto on_meta = std::find_if(parameters.begin(), parameters.end(), is_meta);
  const auto with_values = std::find_if_not(parameters.begin(), parameters.end(), is_meta);
  TORCH_CHECK_VALUE(on_meta == parameters.end() || with_values == parameters.end(), "parameter '", on_meta->path,
                    "' is on the meta device, but '", with_values->path,
                    "' of the same group has values; wrap them in two groups, or build both on the meta device");
}

// Parameters that must be gathered in their own dtype: the affine of batch and instance norm, which meets fp32
// statistics.
std::set<const c10::TensorImpl*> precise_parameters(const torch::nn::Module& root) {
  std::set<const c10::TensorImpl*> precise;
  const auto add = [&precise](const torch::nn::Module& given) {
    const auto& module = unwrapped(given);
    namespace nn = torch::nn;
    const bool is_norm = module.as<nn::BatchNorm1dImpl>() || module.as<nn::BatchNorm2dImpl>() ||
                         module.as<nn::BatchNorm3dImpl>() || module.as<nn::InstanceNorm1dImpl>() ||
                         module.as<nn::InstanceNorm2dImpl>() || module.as<nn::InstanceNorm3dImpl>();
    if (!is_norm) return;
    for (const auto& parameter : module.parameters(/*recurse=*/false))
      if (parameter.defined()) precise.insert(parameter.unsafeGetTensorImpl());
  };
  add(root);
  for (const auto& module : root.modules(/*include_self=*/false)) add(*module);
  return precise;
}

void place(NamedParameter& parameter, const FullyShardOptions& options) {
  parameter.mesh = options.mesh;
  parameter.is_whole = parameter.tensor.numel() < options.replicate_below;
  if (parameter.is_whole || !options.shard_placement_fn) return;
  const auto placement = options.shard_placement_fn(parameter.path, parameter.tensor);
  if (!placement) return;
  const auto ndim = parameter.tensor.dim();
  const auto dim = placement->placement.dim;
  TORCH_CHECK(dim >= -ndim && dim < ndim, "shard_placement_fn: Shard dim ", dim, " is invalid for ", ndim, "D tensor '",
              parameter.path, "'");
  parameter.dim = dim < 0 ? dim + ndim : dim;
  if (placement->mesh.defined()) parameter.mesh = checked_mesh(placement->mesh);
  const auto num_shards = parameter.mesh.size(parameter.mesh.ndim() - 1);
  TORCH_CHECK_NOT_IMPLEMENTED(parameter.dim == 0 || parameter.tensor.size(parameter.dim) % num_shards == 0,
                              "shard_placement_fn: dim ", parameter.dim, " of '", parameter.path, "' is ",
                              parameter.tensor.size(parameter.dim), ", which does not divide by ", num_shards,
                              " ranks; only dim 0 may be uneven");
}

bool is_ignored(const at::Tensor& tensor, const FullyShardOptions& options) {
  return std::any_of(options.ignored_params.begin(), options.ignored_params.end(),
                     [&](const at::Tensor& ignored) { return ignored.is_same(tensor); });
}

// Whether an earlier fully_shard owns it.
bool is_claimed(const std::string& path, const at::Tensor& tensor) {
  const auto* state = dtensor::state_of(tensor);
  TORCH_CHECK_NOT_IMPLEMENTED(!state || state->owner, "parameter '", path,
                              "' is a DTensor already; combining with other parallelisms is not supported yet");
  return state != nullptr;
}

void add_unclaimed(const torch::nn::Module& module, const FullyShardOptions& options,
                   std::set<const c10::TensorImpl*>& seen, std::vector<NamedParameter>& unclaimed) {
  check_members("", unwrapped(module));
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    check_members(item.key() + ".", unwrapped(*item.value()));
  const auto precise = precise_parameters(module);
  for (const auto& item : module.named_parameters()) {
    const auto& tensor = item.value();
    if (!tensor.defined() || is_ignored(tensor, options)) continue;
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second || is_claimed(item.key(), tensor)) continue;
    check_parameter(item.key(), tensor);
    NamedParameter parameter{item.key(), tensor};
    parameter.keeps_precision = precise.contains(tensor.unsafeGetTensorImpl());
    place(parameter, options);
    TORCH_CHECK_VALUE(tensor.is_meta() || tensor.device().type() == parameter.mesh.device_type(), "parameter '",
                      item.key(), "' is on ", tensor.device(), " and the mesh on ", parameter.mesh.device_type(),
                      "; move the module first");
    unclaimed.push_back(std::move(parameter));
  }
}

}  // namespace

std::vector<NamedParameter> unclaimed_parameters(const std::vector<torch::nn::Module*>& modules,
                                                 const FullyShardOptions& options) {
  TORCH_CHECK_VALUE(options.replicate_below >= 0, "replicate_below is ", options.replicate_below,
                    ", but a number of elements is needed");
  for (const auto& ignored : options.ignored_params)
    TORCH_CHECK_VALUE(ignored.defined(), "ignored_params holds an undefined tensor");
  std::vector<NamedParameter> unclaimed;
  std::set<const c10::TensorImpl*> seen;
  for (const auto* module : modules) add_unclaimed(*module, options, seen, unclaimed);
  check_meta_is_all_or_none(unclaimed);
  return unclaimed;
}

}  // namespace fsdp::sharding
