#include "parallel/saved_hooks.h"

#include <torch/csrc/autograd/engine.h>

#include "comm/immortal.h"
#include "dtensor/shard_state.h"

namespace fsdp::parallel {

namespace {

thread_local HookScope* innermost_scope = nullptr;

// Never destroyed: threads of other engines may still save tensors while the process exits.
class HookedEngine : public torch::autograd::Engine {
 public:
  static torch::autograd::Engine& instance() {
    static comm::Immortal<HookedEngine> engine;
    return engine.get();
  }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (!innermost_scope) return nullptr;
    return innermost_scope->make();
  }
};

void ensure_engine_installed() {
  using torch::autograd::Engine;
  static const bool installed = [] {
    TORCH_CHECK_NOT_IMPLEMENTED(&Engine::get_default_engine() == &Engine::get_base_engine(),
                                "saved-tensor hooks and activation checkpointing: another library has put its own "
                                "autograd engine in place. In a Python process use torch.utils.checkpoint and "
                                "torch.autograd.graph.saved_tensors_hooks");
    torch::autograd::set_default_engine_stub(&HookedEngine::instance);
    return true;
  }();
  (void)installed;
}

// Without what leads to the graph: a saved output that kept its graph would keep itself.
at::Tensor detached(const at::Tensor& tensor) {
  if (dtensor::state_of(tensor)) return dtensor::alias_handle(tensor);
  const c10::impl::ExcludeDispatchKeyGuard exclude(dtensor::kWrapperKey);
  return tensor.detach();
}

}  // namespace

VersionedTensor::VersionedTensor(const at::Tensor& tensor)
    : tensor_(detached(tensor)), version_(static_cast<uint32_t>(tensor._version())) {}

const at::Tensor& VersionedTensor::get() const {
  const auto version = static_cast<uint32_t>(tensor_._version());
  TORCH_CHECK(version == version_,
              "one of the variables needed for gradient computation has been modified by an inplace operation: [",
              tensor_.toString(), " ", tensor_.sizes(), "] is at version ", version, "; expected version ", version_,
              " instead");
  return tensor_;
}

void SavedTensor::call_pack_hook(const at::Tensor& tensor) {
  if (dtensor::has_wrapper_key(tensor)) {
    passed_ = VersionedTensor(tensor);
  } else {
    pack(tensor.detach());
  }
}

at::Tensor SavedTensor::call_unpack_hook() { return passed_.defined() ? passed_.get() : unpack(); }

HookScope::HookScope() : outer_(innermost_scope) {
  ensure_engine_installed();
  innermost_scope = this;
}

// Scopes on the heap need not end in the reverse of the order in which they began.
HookScope::~HookScope() {
  auto** place = &innermost_scope;
  while (*place && *place != this) place = &(*place)->outer_;
  if (*place) *place = outer_;
}

}  // namespace fsdp::parallel
