#include "dtensor/resolver.h"

#include "dtensor/gather.h"
#include "dtensor/layout.h"

namespace fsdp::dtensor {

namespace {
// Whole on every rank, and no gradient comes back: a parameter that is whole has an owner, which sees each use.
bool is_plain_value(const at::Tensor& tensor, const ShardState& state) {
  if (state.owner || (at::GradMode::is_enabled() && tensor.requires_grad())) return false;
  return std::none_of(state.placements.begin(), state.placements.end(), is_shard);  // gather() reduces Partial ones
}
}  // namespace

void Resolver::see(const at::Tensor& tensor) {
  if (!has_wrapper_key(tensor)) return;
  Owner* owner = nullptr;
  if (auto* state = state_of(tensor)) {
    if (!path_) path_ = &state->path;
    if (any_partial(state->placements)) partials_.push_back(state);
    if (is_plain_value(tensor, *state)) return;
    owner = state->owner;
    if (owner && mode_ != Mode::kCompute && owner->precision(state->index).is_lowered) owner = nullptr;
    if (owner) note_precision(*owner, state->index);
    if (!owner) owner = lone_owner(state);
    if (!owner) {
      lone_.push_back(std::make_shared<LoneCopy>(shared_state_of(tensor), tensor.sizes(), mode_ == Mode::kExact));
      owner = lone_.back().get();
    }
  } else if (auto* storage = gathered_storage_of(tensor)) {
    owner = storage->owner.get();
    note_precision(*owner, storage->index);
    if (!path_) path_ = &owner->path(storage->index);
  } else {
    return;
  }
  if (std::find(owners_.begin(), owners_.end(), owner) == owners_.end()) owners_.push_back(owner);
}

void Resolver::gather() {
  if (!path_) return;
  const Reason reason{op_, path_};
  reduce_partials(partials_, reason);
  while (!owners_.empty()) {
    auto& scheduler = owners_.front()->scheduler();
    const auto rest = std::stable_partition(owners_.begin(), owners_.end(),
                                            [&](Owner* owner) { return &owner->scheduler() == &scheduler; });
    scheduler.touch({owners_.begin(), rest}, reason);
    owners_.erase(owners_.begin(), rest);
  }
}

void Resolver::note_precision(const Owner& owner, int index) {
  if (const auto dtype = owner.precision(index).compute_dtype) cast_dtype_ = dtype;
}

Owner* Resolver::lone_owner(const ShardState* state) const {
  const auto found = std::find_if(lone_.begin(), lone_.end(), [&](const auto& copy) { return copy->state() == state; });
  return found == lone_.end() ? nullptr : found->get();
}

at::Tensor Resolver::resolve(const at::Tensor& tensor) const {
  auto* state = state_of(tensor);
  if (!state) return tensor;
  if (is_plain_value(tensor, *state)) return state->local();
  auto* lone = lone_owner(state);
  return (lone ? lone : state->owner)->gathered(state->index, tensor);
}

void Resolver::write_back(const at::Tensor& tensor) const {
  if (auto* state = state_of(tensor)) {
    if (is_plain_value(tensor, *state)) return tensor.unsafeGetTensorImpl()->bump_version();
    auto* lone = lone_owner(state);
    (lone ? lone : state->owner)->write_back(state->index);
  } else if (auto* storage = gathered_storage_of(tensor)) {
    storage->owner->write_back(storage->index);
  }
}

at::Tensor follow_dtype(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.dim() > 0 && tensor.is_floating_point() ? tensor.to(dtype) : tensor;
}

void check_not_lowered(const at::Tensor& tensor) {
  const auto* storage = gathered_storage_of(tensor);
  if (!storage) return;
  const auto precision = storage->owner->precision(storage->index);
  TORCH_CHECK_NOT_IMPLEMENTED(!precision.is_lowered, "a write through a view of '",
                              storage->owner->path(storage->index), "', which was gathered as ", precision.dtype,
                              " for compute, would round the parameter: write to the parameter itself");
}

void check_writable(const at::Tensor& tensor) {
  if (!at::GradMode::is_enabled() || !tensor.requires_grad()) return;
  if (state_of(tensor)) {
    TORCH_CHECK(!tensor.is_leaf(), "a leaf Variable that requires grad is being used in an in-place operation.");
  } else if (gathered_storage_of(tensor)) {
    TORCH_CHECK(false, "a view of a leaf Variable that requires grad is being used in an in-place operation.");
  }
}

}  // namespace fsdp::dtensor
