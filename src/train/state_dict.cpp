#include <fsdp/state_dict.h>
#include <torch/serialize/output-archive.h>

#include "comm/collectives.h"
#include "comm/group_state.h"
#include "comm/meeting.h"
#include "dtensor/gather.h"
#include "dtensor/layout.h"

namespace fsdp {

namespace {

// The whole tensor on rank 0 of the mesh, undefined elsewhere. A plain tensor is taken from the caller itself.
at::Tensor gather_to_rank0(const std::string& name, const at::Tensor& tensor) {
  auto* state = dtensor::state_of(tensor);
  if (!state) return tensor.detach();
  const dtensor::PlainScope plain;
  const auto mesh_dim = state->mesh.ndim() - 1;  // parameters are sharded over the last mesh dim, on tensor dim 0
  const auto group = state->mesh.get_group(mesh_dim);
  dtensor::meet(*state, "full_state_dict of " + name);
  const auto num_ranks = state->mesh.size(mesh_dim);
  const auto& local = state->local();
  auto padded_sizes = local.sizes().vec();
  padded_sizes[0] = dtensor::chunk_length(tensor.size(0), num_ranks);
  auto padded = at::zeros(padded_sizes, local.options());
  padded.narrow(0, 0, local.size(0)).copy_(local);
  auto whole_sizes = padded_sizes;
  whole_sizes[0] *= num_ranks;
  const bool is_rank0 = state->mesh.get_local_rank(mesh_dim) == 0;
  auto whole = is_rank0 ? at::empty(whole_sizes, local.options()) : at::Tensor();
  comm::gather_to_rank0(is_rank0 ? whole.view({-1}) : at::Tensor(), padded.view({-1}), group, name).wait();
  return is_rank0 ? whole.narrow(0, 0, tensor.size(0)) : at::Tensor();
}

// Whether this rank is the one that gets the whole weights: rank 0 on every mesh dim, or a module without shards.
bool is_collector(const torch::nn::Module& module) {
  for (const auto& parameter : module.parameters()) {
    const auto* state = dtensor::state_of(parameter);
    if (!state) continue;
    const auto coordinate = state->mesh.get_coordinate();
    return std::all_of(coordinate->begin(), coordinate->end(), [](int64_t c) { return c == 0; });
  }
  return true;
}

// What went wrong on the writing rank is raised on every rank.
void share_error(const torch::nn::Module& module, const std::string& path, const std::string& error) {
  std::string shared = error;
  for (const auto& parameter : module.parameters()) {
    const auto* state = dtensor::state_of(parameter);
    if (!state) continue;
    for (int64_t mesh_dim = 0; mesh_dim < state->mesh.ndim(); ++mesh_dim) {
      const auto meeting = comm::meeting_of(state->mesh.get_group(mesh_dim));
      shared = meeting->compare_with_rank0("the outcome of save_full_state_dict", shared,
                                           [](const std::string& theirs) { return theirs; });
    }
    break;
  }
  TORCH_CHECK(shared.empty(), "save_full_state_dict(", path, ") failed on rank 0: ", shared);
}

// Moves the tensors of `weights` under `prefix` into `archive`, nested as torch::save(module) nests them.
void write_module(const torch::nn::Module& module, const std::string& prefix,
                  const torch::OrderedDict<std::string, at::Tensor>& weights,
                  torch::serialize::OutputArchive& archive) {
  const auto at_name = [&](const std::string& name) {
    const auto* found = weights.find(prefix + name);
    return found ? *found : at::Tensor();
  };
  for (const auto& item : module.named_parameters(false)) archive.write(item.key(), at_name(item.key()));
  for (const auto& item : module.named_buffers(false))
    archive.write(item.key(), at_name(item.key()), /*is_buffer=*/true);
  for (const auto& item : module.named_children()) {
    if (!item.value()->is_serializable()) continue;
    torch::serialize::OutputArchive child(archive.compilation_unit());
    write_module(*item.value(), prefix + item.key() + ".", weights, child);
    archive.write(item.key(), child);
  }
}

}  // namespace

torch::OrderedDict<std::string, at::Tensor> full_state_dict(const torch::nn::Module& module) {
  torch::OrderedDict<std::string, at::Tensor> weights;
  const bool collects = is_collector(module);
  const auto take = [&](const std::string& name, const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const auto whole = gather_to_rank0(name, tensor);
    if (collects) weights.insert(name, whole.cpu());
  };
  for (const auto& item : module.named_parameters()) take(item.key(), item.value());
  for (const auto& item : module.named_buffers()) take(item.key(), item.value());
  return weights;
}

void save_full_state_dict(const torch::nn::Module& module, const std::string& path) {
  const auto weights = full_state_dict(module);
  std::string error;
  if (is_collector(module)) {
    try {
      torch::serialize::OutputArchive archive;
      write_module(module, "", weights, archive);
      archive.save_to(path);
    } catch (const std::exception& failure) {
      error = failure.what();
    }
  }
  share_error(module, path, error);
}

}  // namespace fsdp
