#pragma once
// The tensors of a module under the names of its state dict, and the meshes they are spread over.
#include <fsdp/device_mesh.h>
#include <torch/nn/module.h>

namespace fsdp::train {

struct ModuleEntry {
  std::string name;
  at::Tensor tensor;
  bool is_buffer = false;
};

// In the order of PyTorch's state_dict. A tied tensor comes once a name.
[[nodiscard]] std::vector<ModuleEntry> entries_of(const torch::nn::Module& module);

// Each mesh of the sharded tensors once; empty where none is sharded.
[[nodiscard]] std::vector<DeviceMesh> meshes_of(const std::vector<at::Tensor>& tensors);
[[nodiscard]] std::vector<DeviceMesh> meshes_of(const std::vector<ModuleEntry>& entries);

// Whether this rank is the first of all `meshes`.
[[nodiscard]] bool is_first_rank(const std::vector<DeviceMesh>& meshes);
// That one rank is the first of all meshes of all ranks, and so can get and give whole tensors of the module. `title`:
// the function, for messages. Collective over `meshes`. Errors, on every rank: c10::NotImplementedError.
void check_one_first_rank(const std::vector<DeviceMesh>& meshes, const std::string& title);
// text_of_first_rank() over all `meshes`.
[[nodiscard]] std::string text_of_first_rank(const std::vector<DeviceMesh>& meshes, const std::string& topic,
                                             std::string text);
// any_complaint() over all `meshes`. Complaints of one rank say which: "rank 2: ...".
[[nodiscard]] std::string any_complaint(const std::vector<DeviceMesh>& meshes, const std::string& topic,
                                        std::string complaint);

// Errors: c10::Error listing the entries without values, on the meta device.
void check_off_meta(const std::vector<ModuleEntry>& entries, const std::string& action);

// "a, b, c"; long lists end in "and 7 more".
[[nodiscard]] std::string listed(const std::vector<std::string>& names);

}  // namespace fsdp::train
