#include "train/module_entries.h"

#include <set>

#include "dtensor/shard_state.h"
#include "mesh/agreement.h"

namespace fsdp::train {

namespace {
constexpr size_t kMaxListed = 20;
}

std::vector<ModuleEntry> entries_of(const torch::nn::Module& module) {
  std::vector<ModuleEntry> entries;
  module.apply([&](const std::string& path, const torch::nn::Module& part) {
    const auto prefix = path.empty() ? path : path + ".";
    for (const auto& item : part.named_parameters(/*recurse=*/false))
      entries.push_back({prefix + item.key(), item.value(), false});
    for (const auto& item : part.named_buffers(/*recurse=*/false))
      if (item.value().defined()) entries.push_back({prefix + item.key(), item.value(), true});
  });
  return entries;
}

std::vector<DeviceMesh> meshes_of(const std::vector<at::Tensor>& tensors) {
  std::vector<DeviceMesh> meshes;
  for (const auto& tensor : tensors) {
    const auto* state = dtensor::state_of(tensor);
    if (state && std::find(meshes.begin(), meshes.end(), state->mesh) == meshes.end()) meshes.push_back(state->mesh);
  }
  return meshes;
}

std::vector<DeviceMesh> meshes_of(const std::vector<ModuleEntry>& entries) {
  std::vector<at::Tensor> tensors;
  for (const auto& entry : entries) tensors.push_back(entry.tensor);
  return meshes_of(tensors);
}

bool is_first_rank(const std::vector<DeviceMesh>& meshes) {
  return std::all_of(meshes.begin(), meshes.end(), [](const DeviceMesh& mesh) { return fsdp::is_first_rank(mesh); });
}

// The meshes of one rank may start alike where those of another do not.
void check_one_first_rank(const std::vector<DeviceMesh>& meshes, const std::string& title) {
  std::set<int64_t> first_ranks;
  for (const auto& mesh : meshes) first_ranks.insert(mesh.mesh().flatten()[0].item<int64_t>());
  std::string complaint;
  if (first_ranks.size() > 1)
    complaint = c10::str("parts of this module lie on meshes that start with different ranks (",
                         c10::Join(", ", first_ranks), "): no rank can hold all of it; take the parts one by one");
  complaint = any_complaint(meshes, "the meshes of " + title, complaint);
  TORCH_CHECK_NOT_IMPLEMENTED(complaint.empty(), title, ": ", complaint);
}

std::string text_of_first_rank(const std::vector<DeviceMesh>& meshes, const std::string& topic, std::string text) {
  for (const auto& mesh : meshes) text = fsdp::text_of_first_rank(mesh, topic, text);
  return text;
}

std::string any_complaint(const std::vector<DeviceMesh>& meshes, const std::string& topic, std::string complaint) {
  if (!complaint.empty() && !meshes.empty() && meshes.front().size() > 1)
    complaint = c10::str("rank ", meshes.front().get_rank(), ": ", complaint);
  for (const auto& mesh : meshes) complaint = fsdp::any_complaint(mesh, topic, complaint);
  return complaint;
}

void check_off_meta(const std::vector<ModuleEntry>& entries, const std::string& action) {
  std::vector<std::string> names;
  for (const auto& entry : entries)
    if (entry.tensor.is_meta()) names.push_back(entry.name);
  TORCH_CHECK(names.empty(), action, ": no values yet, on the meta device: ", listed(names),
              ". Call fsdp::materialize(module, device, init) first");
}

std::string listed(const std::vector<std::string>& names) {
  const std::vector<std::string> shown(names.begin(), names.begin() + std::min(names.size(), kMaxListed));
  const auto text = c10::Join(", ", shown);
  return names.size() == shown.size() ? text : c10::str(text, " and ", names.size() - shown.size(), " more");
}

}  // namespace fsdp::train
