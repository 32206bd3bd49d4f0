#pragma once
// A module whose forward is checkpointed, under the names of the module that it wraps.
//
//   block = register_module("block", fsdp::checkpoint_wrapper(Block(options)));
//   block->forward(x);                      // runs again in backward
//   block->wrapped()->num_heads;            // the Block itself
//
//   fsdp::apply_activation_checkpointing(*model, [](const torch::nn::Module& module) {
//     return module.as<torch::nn::Linear>() != nullptr;
//   });
//
// PyTorch: checkpoint_wrapper, CheckpointWrapper, apply_activation_checkpointing.
#include <fsdp/activation_checkpoint.h>
#include <fsdp/module_pointer.h>
#include <fsdp/module_wrapper.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>

namespace fsdp {

// What checkpointing wrappers of every type share.
class CheckpointWrapperBase : public WrapperModule {
 public:
  [[nodiscard]] const CheckpointOptions& options() const { return options_; }

 protected:
  CheckpointWrapperBase(std::shared_ptr<torch::nn::Module> module, const CheckpointOptions& options)
      : WrapperModule("CheckpointWrapper", std::move(module)), options_(options) {}

 private:
  CheckpointOptions options_;
};

template <class M>
class CheckpointWrapper : public CheckpointWrapperBase {
 public:
  // Errors: c10::ValueError for a null module.
  explicit CheckpointWrapper(std::shared_ptr<M> module, const CheckpointOptions& options = {})
      : CheckpointWrapperBase(module, options), wrapped_(std::move(module)) {}

  template <class... Args>
  auto forward(Args&&... args) {
    return checkpoint(options(), wrapped_, std::forward<Args>(args)...);
  }

  [[nodiscard]] const std::shared_ptr<M>& wrapped() const { return wrapped_; }

  std::shared_ptr<torch::nn::Module> clone(const std::optional<torch::Device>& device = std::nullopt) const override {
    return std::make_shared<CheckpointWrapper>(std::dynamic_pointer_cast<M>(wrapped_->clone(device)), options());
  }

 private:
  // Called when the module around it is cloned.
  void clone_(torch::nn::Module& other, const std::optional<torch::Device>& device) override {
    const auto clone = std::dynamic_pointer_cast<CheckpointWrapper>(other.clone(device));
    TORCH_CHECK(clone, "a CheckpointWrapper cannot be cloned into a wrapper of another type");
    *this = *clone;
  }

  std::shared_ptr<M> wrapped_;
};

// Wraps a TORCH_MODULE holder or a std::shared_ptr.
template <class M>
[[nodiscard]] std::shared_ptr<CheckpointWrapper<M>> checkpoint_wrapper(std::shared_ptr<M> module,
                                                                       const CheckpointOptions& options = {}) {
  return std::make_shared<CheckpointWrapper<M>>(std::move(module), options);
}
template <class M>
[[nodiscard]] std::shared_ptr<CheckpointWrapper<M>> checkpoint_wrapper(const torch::nn::ModuleHolder<M>& holder,
                                                                       const CheckpointOptions& options = {}) {
  return checkpoint_wrapper(holder.ptr(), options);
}

// The wrapper of a child of torch::nn::Sequential, of which only a forward from a tensor to a tensor is known.
class AnyCheckpointWrapper : public CheckpointWrapperBase {
 public:
  explicit AnyCheckpointWrapper(torch::nn::AnyModule module, const CheckpointOptions& options = {});
  at::Tensor forward(at::Tensor x);
  std::shared_ptr<torch::nn::Module> clone(const std::optional<torch::Device>& device = std::nullopt) const override;

 private:
  torch::nn::AnyModule any_;
};

using ModulePredicate = std::function<bool(const torch::nn::Module&)>;

// Replaces every descendant for which `predicate` holds by its checkpointed wrapper, never `model` itself, and returns
// how many. Call it before fully_shard.
//
// C++ has no attribute to replace: a module that holds a child calls it through a member of the child's own type. Only
// torch::nn::Sequential holds its children by what they do, from a tensor to a tensor. Errors, before anything is
// changed: c10::ValueError with the paths of matching modules that live elsewhere (ModuleList, members), where
// fsdp::checkpoint(child, x) in forward is the way; and of matching modules that are sharded already.
int64_t apply_activation_checkpointing(torch::nn::Module& model, const ModulePredicate& predicate,
                                       const CheckpointOptions& options = {});
template <detail::ModulePointer P>
int64_t apply_activation_checkpointing(const P& model, const ModulePredicate& predicate,
                                       const CheckpointOptions& options = {}) {
  return apply_activation_checkpointing(detail::module_of(model, "apply_activation_checkpointing"), predicate, options);
}

}  // namespace fsdp
