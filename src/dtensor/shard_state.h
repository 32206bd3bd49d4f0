#pragma once
// What every handle of one sharded tensor shares: its mesh, its placements and this rank's private part.
//
// A handle is an at::Tensor with global sizes, a storage without bytes, the wrapper dispatch key, and a BackendMeta
// that leads here. detach() and data() make further handles of the same state.
#include <c10/core/TensorImpl.h>
#include <fsdp/device_mesh.h>
#include <fsdp/placement.h>

#include <memory>
#include <string>

#include "dtensor/ledger.h"

namespace fsdp::dtensor {

class Owner;

// An out-of-core wrapper key above autograd and autocast; no LibTorch operator has a kernel there.
inline constexpr auto kWrapperKey = c10::DispatchKey::DeferredInit;

// A value still being computed: a reduction in flight, or an addition queued behind one.
class Pending {
 public:
  virtual ~Pending() = default;
  virtual void wait() = 0;  // may be called several times, from any handle
};

class ShardState {
 public:
  ShardState(DeviceMesh mesh, Placements placements, at::Tensor local, std::string path)
      : mesh(std::move(mesh)), placements(std::move(placements)), path(std::move(path)), local_(std::move(local)) {}

  const DeviceMesh mesh;
  Placements placements;
  std::string path;        // dotted name of the parameter, or what the tensor is
  Owner* owner = nullptr;  // the parameter group, when this is a parameter; every handle keeps it alive
  int index = -1;          // the parameter's place in its group
  std::shared_ptr<Ledger> ledger;
  Charge charge;

  // This rank's part, once everything pending has arrived. The only way to it.
  const at::Tensor& local();
  void set_local(at::Tensor local);
  [[nodiscard]] bool is_pending() const { return pending_ != nullptr; }
  void set_pending(std::shared_ptr<Pending> pending) { pending_ = std::move(pending); }
  // Queues `target` += `term`: neither side waits until somebody reads. Only for targets without owner. The term is
  // added as it is now: whoever reads, writes or queues onto it afterwards carries the addition out first.
  static void queue_add(const std::shared_ptr<ShardState>& target, const std::shared_ptr<ShardState>& term);
  // Somebody holds this rank's part as a plain tensor, and would not see what is queued.
  bool is_lent = false;

 private:
  class QueuedAdd;
  // Carries out the addition that waits for this value, if one does.
  void serve_reader();

  at::Tensor local_;
  std::shared_ptr<Pending> pending_;
  std::weak_ptr<ShardState> queued_into_;  // whose addition waits for this value
};

// The state behind a handle; null for every other tensor.
[[nodiscard]] ShardState* state_of(const at::Tensor& tensor);
[[nodiscard]] std::shared_ptr<ShardState> shared_state_of(const at::Tensor& tensor);

// A handle of `state` with global `sizes` and the dtype and device of its local part. `owner` lives as long as any
// handle or alias of it.
[[nodiscard]] at::Tensor make_handle(std::shared_ptr<ShardState> state, at::IntArrayRef sizes,
                                     std::shared_ptr<Owner> owner = nullptr);
// Gives `handle` another dtype or device, those of its state, in place.
void refresh_handle(const at::Tensor& handle, const at::Tensor& target);
// A handle of the same state as `handle`, sharing its version counter (what detach() returns).
[[nodiscard]] at::Tensor alias_handle(const at::Tensor& handle);
// A new tensor of global `sizes`; its part is charged to `ledger`.
[[nodiscard]] at::Tensor make_sharded(const DeviceMesh& mesh, Placements placements, at::Tensor local,
                                      at::IntArrayRef sizes, std::string path, std::shared_ptr<Ledger> ledger);
// A new tensor laid out as `like`: same mesh, placements and global sizes. `path` is empty for what an op computed.
[[nodiscard]] at::Tensor make_like(const ShardState& like, at::IntArrayRef sizes, at::Tensor local,
                                   std::string path = "");
// "values computed from layers.0.weight"; does not grow when values are computed from computed ones.
[[nodiscard]] std::string derived_path(const ShardState& from);

[[nodiscard]] inline bool has_wrapper_key(const at::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has(kWrapperKey);
}

// Ops inside act on plain tensors: no interception, no autograd, normal (not inference) tensors.
class PlainScope {
  c10::InferenceMode inference_{false};
  c10::impl::ExcludeDispatchKeyGuard exclude_{kWrapperKey};
  at::NoGradGuard no_grad_;
};

}  // namespace fsdp::dtensor
