#include "sharding/wrap_checks.h"

#include <sstream>

#include "comm/collectives.h"
#include "comm/group_state.h"
#include "comm/meeting.h"
#include "mesh/agreement.h"

namespace fsdp::sharding {

namespace {

std::string dtype_name(const std::optional<at::ScalarType>& dtype) { return dtype ? c10::toString(*dtype) : "own"; }

// What decides how many bytes the ranks exchange, and with whom.
std::string structure_of(const std::vector<NamedParameter>& parameters, const FullyShardOptions& options) {
  std::ostringstream text;
  text << "param_dtype " << dtype_name(options.mp_policy.param_dtype) << ", reduce_dtype "
       << dtype_name(options.mp_policy.reduce_dtype) << ", reshard_after_forward "
       << options.reshard_after_forward.num_ranks(/*is_root=*/false) << "\n";
  for (const auto& parameter : parameters) {
    const auto& tensor = parameter.tensor;
    text << parameter.path << " " << tensor.sizes() << " " << tensor.scalar_type()
         << (tensor.requires_grad() ? "" : " frozen") << (tensor.is_meta() ? " on meta" : "")
         << (parameter.is_whole ? " whole" : c10::str(" cut on dim ", parameter.dim)) << " over "
         << parameter.mesh.mesh().sizes() << " ranks\n";
  }
  return text.str();
}

// One line a parameter that differs whenever its values do, up to collisions.
std::string checksums_of(const std::vector<NamedParameter>& parameters) {
  const dtensor::PlainScope plain;
  std::string text;
  for (const auto& parameter : parameters)
    if (!parameter.tensor.is_meta()) text += parameter.path + " " + checksum(parameter.tensor) + "\n";
  return text;
}

}  // namespace

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
    if (x != y) return c10::str("rank 0 has '", y, "', this rank has '", x, "'");
  }
}

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

void connect_neighbours(const ReshardAfterForward& reshard, const DeviceMesh& mesh) {
  if (!reshard.is_number()) return;
  std::ignore = comm::neighbours_of(mesh.get_group(mesh.ndim() - 1), static_cast<int>(reshard.num_ranks(false)));
}

void check_offload(const std::optional<CPUOffloadPolicy>& policy, const DeviceMesh& mesh) {
  if (!policy) return;
  TORCH_CHECK_NOT_IMPLEMENTED(mesh.device_type() == c10::kCPU, "CPUOffloadPolicy on a mesh of ", mesh.device_type(),
                              " is not supported yet");
  TORCH_WARN_ONCE("CPUOffloadPolicy has nothing to do: the mesh is on the CPU, where the shards rest already");
}

void check_same_start(const std::vector<NamedParameter>& parameters, const std::string& title,
                      const FullyShardOptions& options) {
  const auto& mesh = options.mesh;
  const bool compare_values = !options.sync_init;
  const auto structure = structure_of(parameters, options);
  const auto checksums = compare_values ? checksums_of(parameters) : std::string();
  for (int64_t mesh_dim = 0; mesh_dim < mesh.ndim(); ++mesh_dim) {
    if (mesh.size(mesh_dim) == 1) continue;
    const auto meeting = comm::meeting_of(mesh.get_group(mesh_dim));
    const auto structural = meeting->compare_with_rank0(
        "wrap by " + title, structure, [&](const std::string& theirs) { return first_difference(structure, theirs); });
    TORCH_CHECK_VALUE(structural.empty(), title, ": the ranks wrap different modules: ", structural);
    if (!compare_values) continue;
    const auto different = meeting->compare_with_rank0("values of " + title, checksums, [&](const std::string& theirs) {
      return first_difference(checksums, theirs);
    });
    if (different.empty()) continue;
    TORCH_WARN(title, ": the ranks start from different values (checksums: ", different,
               "). Seed all ranks alike, load a checkpoint, or pass sync_init = true");
  }
}

void broadcast_start(const std::vector<NamedParameter>& parameters, const std::vector<torch::nn::Module*>& modules,
                     const DeviceMesh& mesh) {
  const dtensor::PlainScope plain;
  for (int64_t mesh_dim = 0; mesh_dim < mesh.ndim(); ++mesh_dim) {
    if (mesh.size(mesh_dim) == 1) continue;
    const auto group = mesh.get_group(mesh_dim);
    for (const auto& parameter : parameters)
      if (!parameter.tensor.is_meta()) comm::broadcast(parameter.tensor.detach(), 0, group, parameter.path).wait();
    for (const auto* module : modules)
      for (const auto& item : module->named_buffers())
        if (item.value().defined() && !item.value().is_meta())
          comm::broadcast(item.value().detach(), 0, group, item.key()).wait();
  }
}

}  // namespace fsdp::sharding
