#include <fsdp/dtensor.h>
#include <fsdp/state_dict.h>
#include <torch/serialize/output-archive.h>

#include <unordered_map>

#include "dtensor/rank0.h"
#include "mesh/sequence_scope.h"
#include "sharding/module_tree.h"
#include "train/module_entries.h"
#include "train/outcome.h"

namespace fsdp {

namespace {

// A tensor and the names it goes by.
struct TiedEntry {
  at::Tensor tensor;
  std::vector<std::string> names;
};

std::vector<TiedEntry> grouped_by_tensor(const std::vector<train::ModuleEntry>& entries) {
  std::vector<TiedEntry> groups;
  std::unordered_map<const c10::TensorImpl*, size_t> places;
  for (const auto& entry : entries) {
    const auto [found, is_new] = places.emplace(entry.tensor.unsafeGetTensorImpl(), groups.size());
    if (is_new) groups.push_back({entry.tensor, {}});
    groups[found->second].names.push_back(entry.name);
  }
  return groups;
}

// Moves the tensors of `weights` under `prefix` into `archive`, nested as torch::save(module) nests them.
void write_module(const torch::nn::Module& module, const std::string& prefix, const StateDict& weights,
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

StateDict state_dict(const torch::nn::Module& module) {
  const auto title = "state_dict(" + sharding::type_name(module) + ")";
  StateDict weights;
  for (const auto& entry : train::entries_of(module)) {
    mesh::check_not_split(entry.tensor, entry.name, title);
    weights.insert(entry.name, entry.tensor.detach());
  }
  return weights;
}

void stream_full_state_dict(const torch::nn::Module& module, const TensorSink& sink) {
  const auto title = "full_state_dict(" + sharding::type_name(module) + ")";
  const auto entries = train::entries_of(module);
  train::check_off_meta(entries, title);
  for (const auto& entry : entries) mesh::check_not_split(entry.tensor, entry.name, title);
  const auto meshes = train::meshes_of(entries);
  train::check_one_first_rank(meshes, title);
  const bool collects = train::is_first_rank(meshes);
  train::Outcome outcome;
  const auto give = [&](const TiedEntry& entry, const at::Tensor& whole) {
    if (!collects) return;
    outcome.run([&] {
      for (const auto& name : entry.names) sink(name, whole);
    });
  };
  std::string complaint;
  for (const auto& entry : grouped_by_tensor(entries)) {
    auto* state = dtensor::state_of(entry.tensor);
    if (!state) {
      give(entry, collects ? entry.tensor.detach().clone() : at::Tensor());
      continue;
    }
    // All ranks are about to gather this tensor, and the sink took the ones before.
    complaint = train::any_complaint({state->mesh}, "full_state_dict of " + entry.names.front(), outcome.complaint());
    if (!complaint.empty()) break;
    const auto whole = dtensor::gather_to_first_rank(*state, entry.tensor.sizes());
    give(entry, whole);
  }
  if (complaint.empty()) complaint = train::any_complaint(meshes, "the end of full_state_dict", outcome.complaint());
  outcome.rethrow();
  TORCH_CHECK(complaint.empty(), "full_state_dict ended early, because ", complaint);
}

StateDict full_state_dict(const torch::nn::Module& module) {
  std::unordered_map<std::string, at::Tensor> found;
  stream_full_state_dict(module, [&](const std::string& name, const at::Tensor& whole) { found[name] = whole.cpu(); });
  StateDict weights;
  for (const auto& entry : train::entries_of(module)) {
    const auto item = found.find(entry.name);
    if (item != found.end()) weights.insert(entry.name, item->second);
  }
  return weights;
}

void save_full_state_dict(const torch::nn::Module& module, const std::string& path) {
  const auto weights = full_state_dict(module);
  const auto meshes = train::meshes_of(train::entries_of(module));
  train::Outcome outcome;
  if (train::is_first_rank(meshes)) {
    outcome.run([&] {
      torch::serialize::OutputArchive archive;
      write_module(module, "", weights, archive);
      archive.save_to(path);
    });
  }
  const auto complaint = train::any_complaint(meshes, "the outcome of save_full_state_dict", outcome.complaint());
  TORCH_CHECK(complaint.empty(), "save_full_state_dict(", path, ") failed: ", complaint);
}

}  // namespace fsdp
