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

// Each mesh of the sharded entries once; empty for a plain module.
[[nodiscard]] std::vector<DeviceMesh> meshes_of(const std::vector<ModuleEntry>& entries);

// Whether this rank is the first of all `meshes`: it gets and gives whole tensors. Errors: c10::NotImplementedError
// when they start with different ranks.
[[nodiscard]] bool is_first_rank(const std::vector<DeviceMesh>& meshes);
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

// The message of `error` without LibTorch's backtrace.
[[nodiscard]] std::string text_of(const std::exception& error);

}  // namespace fsdp::train
