#pragma once
// Decides how autograd keeps the tensors that it saves for backward.
//
//   {
//     const fsdp::SavedTensorHooks hooks([](const at::Tensor& x) {          // pack, in forward
//       return [half = x.to(torch::kHalf)] { return half.to(torch::kFloat); };   // unpack, in backward
//     });
//     loss = model->forward(batch);
//   }
//   {
//     const auto on_cpu = fsdp::save_on_cpu({.pin_memory = true});
//     loss = model->forward(batch);
//   }
//
// Of nested scopes the innermost one counts. Sharded parameters and what is gathered of them are never handed to hooks:
// they hold no bytes between forward and backward. PyTorch: torch.autograd.graph.saved_tensors_hooks, save_on_cpu.
#include <ATen/core/Tensor.h>
#include <fsdp/version.h>

#include <functional>
#include <memory>

namespace fsdp {

class SavedTensorHooks {
 public:
  using Unpack = std::function<at::Tensor()>;  // gives back what was packed: same shape, dtype and device
  using Pack = std::function<Unpack(const at::Tensor&)>;

  // Active on this thread until the destructor. `pack` gets a detached tensor, must not change it in place, and may
  // keep it. Errors: c10::ValueError for an empty function; c10::NotImplementedError in a Python process, whose engine
  // has hooks of its own.
  explicit SavedTensorHooks(Pack pack);
  ~SavedTensorHooks();
  SavedTensorHooks(const SavedTensorHooks&) = delete;
  SavedTensorHooks& operator=(const SavedTensorHooks&) = delete;

 private:
  class Scope;
  std::unique_ptr<Scope> scope_;
};

struct SaveOnCpuOptions {
  bool pin_memory = false;  // page-locked copies, which an accelerator reads and writes without waiting
};

// While the result lives, tensors saved for backward wait in the CPU's memory and return to their device when backward
// needs them. Tensors on the CPU stay as they are; the first one says so in a warning.
[[nodiscard]] SavedTensorHooks save_on_cpu(const SaveOnCpuOptions& options = {});

}  // namespace fsdp
