#include "sharding/wrap_checks.h"

#include <sstream>

#include "comm/collectives.h"
#include "comm/group_state.h"
#include "mesh/agreement.h"

namespace fsdp::sharding {

namespace {

std::string dtype_name(const std::optional<at::ScalarType>& dtype) { return dtype ? c10::toString(*dtype) : "own"; }

// What decides how many bytes the ranks exchange, and with whom.
std::string structure_of(const std::vector<NamedParameter>& parameters, const FullyShardOptions& options) {
  std::ostringstream text;
  text << "param_dtype " << dtype_name(options.mp_policy.param_dtype) << ", reduce_dtype "
       << dtype_name(options.mp_policy.reduce_dtype) << ", reshard_after_forward "
       << options.reshard_after_forward.num_ranks(/*is_root=*/false) << (options.sync_init ? ", sync_init" : "")
       << "\n";
  for (const auto& parameter : parameters) {
    const auto& tensor = parameter.tensor;
    text << parameter.path << " " << tensor.sizes() << " " << tensor.scalar_type()
         << (tensor.requires_grad() ? "" : " frozen") << (tensor.is_meta() ? " on meta" : "")
         << (parameter.is_whole ? " whole" : c10::str(" cut on dim ", parameter.dim)) << " over "
         << parameter.mesh.mesh().sizes() << " ranks\n";
  }
  text << "replicate_below " << options.replicate_below << "\n";  // decides whether a group is made
  return text.str();
}

template <class Visit>
void for_each_buffer(const std::vector<torch::nn::Module*>& modules, const Visit& visit) {
  for (const auto* module : modules)
    for (const auto& item : module->named_buffers())
      if (item.value().defined()) visit(item.key(), item.value());
}

// One line a buffer: what is broadcast must have one size.
std::string buffers_of(const std::vector<torch::nn::Module*>& modules) {
  std::ostringstream text;
  for_each_buffer(modules, [&](const std::string& path, const at::Tensor& buffer) {
    text << "buffer " << path << " " << buffer.sizes() << " " << buffer.scalar_type()
         << (buffer.is_meta() ? " on meta" : "") << "\n";
  });
  return text.str();
}

// One line a parameter over `mesh` that differs whenever its values do, up to collisions.
std::string checksums_of(const std::vector<NamedParameter>& parameters, const DeviceMesh& mesh) {
  const dtensor::PlainScope plain;
  std::string text;
  for (const auto& parameter : parameters)
    if (parameter.mesh == mesh && !parameter.tensor.is_meta())
      text += parameter.path + " " + checksum(parameter.tensor) + "\n";
  return text;
}

// Each mesh once, in the order of the parameters, which is the same on all ranks.
std::vector<DeviceMesh> meshes_of(const std::vector<NamedParameter>& parameters) {
  std::vector<DeviceMesh> meshes;
  for (const auto& parameter : parameters)
    if (std::find(meshes.begin(), meshes.end(), parameter.mesh) == meshes.end()) meshes.push_back(parameter.mesh);
  return meshes;
}

void broadcast_over(const DeviceMesh& mesh, const std::string& path, const at::Tensor& tensor) {
  if (tensor.is_meta()) return;
  for (int64_t mesh_dim = 0; mesh_dim < mesh.ndim(); ++mesh_dim)
    if (mesh.size(mesh_dim) > 1) comm::broadcast(tensor.detach(), 0, mesh.get_group(mesh_dim), path).wait();
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

ReshardAfterForward checked_reshard(const ReshardAfterForward& reshard, const DeviceMesh& mesh) {
  if (!reshard.is_number()) return reshard;
  const auto num_ranks = reshard.num_ranks(false);
  const auto size = mesh.size(mesh.ndim() - 1);
  TORCH_CHECK_VALUE(num_ranks >= 1 && num_ranks <= size && size % num_ranks == 0, "reshard_after_forward is ",
                    num_ranks, ", but a number of ranks from 1 to ", size, " that divides it is needed");
  if (num_ranks == size) return true;
  if (num_ranks == 1) {
    TORCH_WARN_ONCE("reshard_after_forward = 1 keeps all parameters gathered: the same as false");
    return false;
  }
  return reshard;
}

void check_reshard_of(const std::vector<NamedParameter>& parameters, const ReshardAfterForward& reshard) {
  if (!reshard.is_number()) return;
  const auto num_ranks = reshard.num_ranks(false);
  for (const auto& parameter : parameters) {
    const auto size = parameter.mesh.size(-1);
    TORCH_CHECK_VALUE(parameter.is_whole || num_ranks >= size || size % num_ranks == 0, "reshard_after_forward is ",
                      num_ranks, ", but '", parameter.path, "' is cut over ", size,
                      " ranks by shard_placement_fn: a number that divides them is needed");
  }
}

void connect_neighbours(const std::vector<NamedParameter>& parameters, const ReshardAfterForward& reshard) {
  if (!reshard.is_number()) return;
  const auto num_ranks = reshard.num_ranks(false);
  for (const auto& parameter : parameters)
    if (!parameter.is_whole && num_ranks < parameter.mesh.size(-1))
      std::ignore = comm::neighbours_of(parameter.mesh.get_group(-1), static_cast<int>(num_ranks));
}

void check_offload(const std::optional<CPUOffloadPolicy>& policy, const DeviceMesh& mesh) {
  if (!policy) return;
  TORCH_CHECK_NOT_IMPLEMENTED(mesh.device_type() == c10::kCPU, "CPUOffloadPolicy on a mesh of ", mesh.device_type(),
                              " is not supported yet");
  TORCH_WARN_ONCE("CPUOffloadPolicy has nothing to do: the mesh is on the CPU, where the shards rest already");
}

void check_same_structure(const std::vector<NamedParameter>& parameters, const std::vector<torch::nn::Module*>& modules,
                          const std::string& title, const FullyShardOptions& options) {
  auto structure = structure_of(parameters, options);
  if (options.sync_init) structure += buffers_of(modules);
  const auto different = difference_between_ranks(options.mesh, "wrap by " + title, structure);
  TORCH_CHECK_VALUE(different.empty(), title, ": the ranks wrap different modules: ", different);
}

void compare_start(const std::vector<NamedParameter>& parameters, const std::string& title) {
  std::string different;
  for (const auto& mesh : meshes_of(parameters)) {
    const auto found = difference_between_ranks(mesh, "values of " + title, checksums_of(parameters, mesh));
    if (different.empty()) different = found;
  }
  if (different.empty()) return;
  TORCH_WARN(title, ": the ranks start from different values (checksums, ", different,
             "). Seed all ranks alike, load a checkpoint, or pass sync_init = true");
}

void broadcast_start(const std::vector<NamedParameter>& parameters, const std::vector<torch::nn::Module*>& modules,
                     const DeviceMesh& mesh) {
  const dtensor::PlainScope plain;
  for (const auto& parameter : parameters) broadcast_over(parameter.mesh, parameter.path, parameter.tensor);
  for_each_buffer(modules,
                  [&](const std::string& path, const at::Tensor& buffer) { broadcast_over(mesh, path, buffer); });
}

}  // namespace fsdp::sharding
