#include <ATen/ops/empty_like.h>
#include <fsdp/saved_tensor_hooks.h>

#include "dtensor/shard_state.h"
#include "parallel/saved_hooks.h"

namespace fsdp {

namespace {

// A pack function is user code, and an operator that is intercepted may be what saves the tensor: what the function
// computes must be intercepted as usual.
c10::impl::LocalDispatchKeySet keys_of_user_code() {
  auto keys = c10::impl::tls_local_dispatch_key_set();
  keys.excluded_ = keys.excluded_.remove(dtensor::kWrapperKey);
  return keys;
}

class UserPackedTensor : public parallel::SavedTensor {
 public:
  explicit UserPackedTensor(const SavedTensorHooks::Pack& pack) : pack_(pack) {}

 private:
  void pack(const at::Tensor& tensor) override {
    const c10::impl::ForceDispatchKeyGuard keys(keys_of_user_code());
    unpack_ = pack_(tensor);
    TORCH_CHECK_VALUE(unpack_, "SavedTensorHooks: pack returned an empty function for a tensor of shape ",
                      tensor.sizes(), "; it must return the function that gives the tensor back");
  }
  at::Tensor unpack() override {
    const c10::impl::ForceDispatchKeyGuard keys(keys_of_user_code());
    auto tensor = unpack_();
    TORCH_CHECK_VALUE(tensor.defined(), "SavedTensorHooks: unpack returned an undefined tensor");
    return tensor;
  }

  const SavedTensorHooks::Pack& pack_;  // pack() is called while the scope lives, and only then
  SavedTensorHooks::Unpack unpack_;
};

SavedTensorHooks::Unpack keep_on_cpu(const at::Tensor& tensor, bool pin_memory) {
  if (tensor.is_cpu()) {
    TORCH_WARN_ONCE("save_on_cpu: tensors saved for backward are on the CPU already and stay as they are");
    return [kept = parallel::VersionedTensor(tensor)] { return kept.get(); };
  }
  auto copy = at::empty_like(tensor, tensor.options().device(c10::kCPU).pinned_memory(pin_memory));
  copy.copy_(tensor, /*non_blocking=*/false);
  return [copy, device = tensor.device(), pin_memory] { return copy.to(device, copy.scalar_type(), pin_memory); };
}

}  // namespace

class SavedTensorHooks::Scope : public parallel::HookScope {
 public:
  explicit Scope(Pack pack) : pack_(std::move(pack)) {}
  std::unique_ptr<parallel::SavedTensor> make() override { return std::make_unique<UserPackedTensor>(pack_); }

 private:
  Pack pack_;
};

SavedTensorHooks::SavedTensorHooks(Pack pack) {
  TORCH_CHECK_VALUE(pack, "SavedTensorHooks: the pack function is empty");
  scope_ = std::make_unique<Scope>(std::move(pack));
}

SavedTensorHooks::~SavedTensorHooks() = default;

SavedTensorHooks save_on_cpu(const SaveOnCpuOptions& options) {
  return SavedTensorHooks(
      [pin_memory = options.pin_memory](const at::Tensor& tensor) { return keep_on_cpu(tensor, pin_memory); });
}

}  // namespace fsdp
