#include "sharding/wrap_checks.h"

#include <torch/nn/modules.h>

#include <set>
#include <sstream>

#include "comm/collectives.h"
#include "comm/group_state.h"
#include "comm/meeting.h"

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
  TORCH_CHECK_NOT_IMPLEMENTED(!parameter.is_meta(), "parameter '", path,
                              "' is on the meta device: give it values before fully_shard");
  TORCH_CHECK_NOT_IMPLEMENTED(parameter.layout() == at::kStrided && parameter.is_contiguous(), "parameter '", path,
                              "' is not contiguous (strides ", parameter.strides(),
                              "); call contiguous() on it before wrapping");
  TORCH_CHECK_VALUE(parameter.numel() > 0, "parameter '", path, "' has no elements: shape ", parameter.sizes());
}

std::string structure_of(const std::vector<NamedParameter>& parameters) {
  std::ostringstream text;
  for (const auto& [path, tensor] : parameters) {
    text << path << " " << tensor.sizes() << " " << tensor.scalar_type() << (tensor.requires_grad() ? "" : " frozen")
         << "\n";
  }
  return text.str();
}

// One line a parameter that differs whenever its values do, up to collisions.
std::string checksum_of(const std::vector<NamedParameter>& parameters) {
  const dtensor::PlainScope plain;
  std::ostringstream text;
  text << std::hexfloat;
  for (const auto& [path, tensor] : parameters) {
    const auto values = tensor.detach();
    const auto sum = at::sum(values, at::kDouble).item<double>();
    const auto scale = values.is_floating_point() ? at::norm(values, 2, at::kDouble).item<double>() : 0.0;
    text << path << " " << sum << " " << scale << "\n";
  }
  return text.str();
}

// The first line in which two listings differ.
std::string first_difference(const std::string& mine, const std::string& theirs) {
  std::istringstream a(mine);
  std::istringstream b(theirs);
  std::string x;
  std::string y;
  while (true) {
    const bool has_x = static_cast<bool>(std::getline(a, x));
    const bool has_y = static_cast<bool>(std::getline(b, y));
    if (!has_x && !has_y) return "";
    if (!has_x) x = "nothing more";
    if (!has_y) y = "nothing more";
    if (x != y) return "rank 0 has '" + y + "', this rank has '" + x + "'";
  }
}

}  // namespace

DeviceMesh checked_mesh(const DeviceMesh& mesh) {
  if (!mesh.defined()) {
    if (!is_initialized()) init_process_group();
    return init_device_mesh(c10::kCPU, {static_cast<int64_t>(world_size())});
  }
  TORCH_CHECK_VALUE(mesh.ndim() == 1 || mesh.ndim() == 2,
                    "fully_shard takes a 1-D mesh (shard) or a 2-D mesh (replicate, "
                    "shard), got ",
                    mesh.ndim(), " dims; slice the mesh by name first");
  TORCH_CHECK(mesh.ndim() == 1 || !mesh.mesh_dim_names().empty(),
              "a 2-D mesh needs mesh_dim_names, so that (replicate, shard) is not mixed up");
  TORCH_CHECK(mesh.get_coordinate(), "this rank is not in the mesh given to fully_shard");
  return mesh;
}

std::vector<NamedParameter> unclaimed_parameters(const torch::nn::Module& module, const DeviceMesh& mesh) {
  check_members("", module);
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    check_members(item.key() + ".", *item.value());
  std::vector<NamedParameter> unclaimed;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters()) {
    auto tensor = item.value();
    if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    if (const auto* state = dtensor::state_of(tensor)) {
      TORCH_CHECK_NOT_IMPLEMENTED(state->owner, "parameter '", item.key(),
                                  "' is a DTensor already; combining with other parallelisms is not supported yet");
      continue;  // the first claimer owns it
    }
    check_parameter(item.key(), tensor);
    TORCH_CHECK_VALUE(tensor.device().type() == mesh.device_type(), "parameter '", item.key(), "' is on ",
                      tensor.device(), " and the mesh on ", mesh.device_type(), "; move the module first");
    unclaimed.push_back({item.key(), tensor});
  }
  return unclaimed;
}

void check_same_start(const std::vector<NamedParameter>& parameters, const DeviceMesh& mesh, const std::string& module,
                      bool compare_values) {
  const auto structure = structure_of(parameters);
  const auto checksum = compare_values ? checksum_of(parameters) : std::string();
  for (int64_t mesh_dim = 0; mesh_dim < mesh.ndim(); ++mesh_dim) {
    if (mesh.size(mesh_dim) == 1) continue;
    const auto meeting = comm::meeting_of(mesh.get_group(mesh_dim));
    const auto structural = meeting->compare_with_rank0(
        "wrap " + module, structure, [&](const std::string& theirs) { return first_difference(structure, theirs); });
    TORCH_CHECK_VALUE(structural.empty(), "fully_shard(", module, "): the ranks wrap different modules: ", structural);
    if (!compare_values) continue;
    const auto different = meeting->compare_with_rank0(
        "values of " + module, checksum, [&](const std::string& theirs) { return first_difference(checksum, theirs); });
    if (!different.empty())
      TORCH_WARN("fully_shard(", module, "): the ranks start from different values (checksums: ", different,
                 "). Seed all ranks alike, load a checkpoint, or pass sync_init = true");
  }
}

void broadcast_start(const std::vector<NamedParameter>& parameters, const torch::nn::Module& module,
                     const DeviceMesh& mesh) {
  const dtensor::PlainScope plain;
  for (int64_t mesh_dim = 0; mesh_dim < mesh.ndim(); ++mesh_dim) {
    if (mesh.size(mesh_dim) == 1) continue;
    const auto group = mesh.get_group(mesh_dim);
    for (const auto& [path, tensor] : parameters) comm::broadcast(tensor.detach(), 0, group, path).wait();
    for (const auto& item : module.named_buffers())
      if (item.value().defined()) comm::broadcast(item.value().detach(), 0, group, item.key()).wait();
  }
}

}  // namespace fsdp::sharding
