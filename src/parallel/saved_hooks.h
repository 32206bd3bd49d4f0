#pragma once
// Saved-tensor hooks: what autograd keeps for backward goes through the innermost scope on this thread.
//
// LibTorch asks its engine for the hooks of each tensor that it saves, and only Python's engine has an answer. The
// first scope puts an engine in its place that differs from LibTorch's own in this answer alone.
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace fsdp::parallel {

// A tensor with the version it had, as autograd keeps what it saves: get() refuses values that were changed in place.
class VersionedTensor {
 public:
  VersionedTensor() = default;
  explicit VersionedTensor(const at::Tensor& tensor);  // keeps it detached
  [[nodiscard]] bool defined() const { return tensor_.defined(); }
  [[nodiscard]] const at::Tensor& get() const;  // Errors: c10::Error

 private:
  at::Tensor tensor_;
  uint32_t version_ = 0;
};

// The hooks of one saved tensor. Sharded tensors and tensors in gathered storage are not handed to pack(): they hold no
// bytes between forward and backward, and gather themselves again when read.
class SavedTensor : public torch::autograd::SavedVariableHooks {
 public:
  void call_pack_hook(const at::Tensor& tensor) final;
  at::Tensor call_unpack_hook() final;

 private:
  virtual void pack(const at::Tensor& tensor) = 0;  // detached
  virtual at::Tensor unpack() = 0;

  VersionedTensor passed_;
};

// Scopes form a stack on each thread. thread_local cannot be avoided: the engine's question carries no context, and
// graphs are recorded on several threads at once.
class HookScope {
 public:
  // Errors: c10::NotImplementedError when another library's engine (Python's) is in place.
  HookScope();
  virtual ~HookScope();
  HookScope(const HookScope&) = delete;
  HookScope& operator=(const HookScope&) = delete;

  [[nodiscard]] virtual std::unique_ptr<SavedTensor> make() = 0;

 private:
  HookScope* outer_;
};

}  // namespace fsdp::parallel
