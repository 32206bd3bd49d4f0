// Pointwise ops, in-place ops, foreach and fused optimizer ops: each rank computes its own part.
#include "dtensor/call.h"
#include "dtensor/gather.h"
#include "dtensor/layout.h"
#include "dtensor/whole_state.h"

namespace fsdp::dtensor {

namespace {

// What the operands at one place of the lists (or of a call without lists) must agree with.
struct Reference {
  at::Tensor handle;
  bool written = false;
};

bool is_sharded(const ShardState& state) {
  return std::any_of(state.placements.begin(), state.placements.end(), is_shard);
}

class PointwisePlan {
 public:
  explicit PointwisePlan(Call& call) : call_(call) {}

  // Whether every operand fits; collects one reference for each list place.
  bool fits() {
    visit([&](const at::Tensor& t, size_t arg, size_t place) { note_reference(t, call_.facts.is_write[arg], place); });
    if (std::none_of(references_.begin(), references_.end(), [](const auto& r) { return r.handle.defined(); }))
      return false;
    bool all = true;
    visit([&](const at::Tensor& t, size_t arg, size_t place) { all = all && operand_fits(t, arg, place); });
    return all;
  }

  void run() {
    const auto returns = call_.written_returns();
    std::vector<at::Tensor> written;
    visit([&](const at::Tensor& t, size_t arg, size_t) {
      if (call_.facts.is_write[arg] && state_of(t)) written.push_back(t);
    });
    for (size_t i = 0; i < call_.num_args(); ++i)
      Call::map_tensors(call_.arg(i), [&](const at::Tensor& t, size_t place) { return local_operand(t, place); });
    {
      const PlainScope plain;
      call_.run();
    }
    for (const auto& t : written) t.unsafeGetTensorImpl()->bump_version();
    for (size_t r = 0; r < call_.num_returns(); ++r) {
      if (call_.facts.return_arg[r] >= 0) continue;
      Call::map_tensors(call_.result(r), [&](const at::Tensor& t, size_t place) { return wrap(t, place); });
    }
    call_.restore(returns);
  }

 private:
  template <class Visit>
  void visit(const Visit& visit) {
    for (size_t i = 0; i < call_.num_args(); ++i) {
      const auto& value = call_.arg(i);
      if (value.isTensor() && value.toTensor().defined()) {
        visit(value.toTensor(), i, 0);
      } else if (value.isTensorList()) {
        size_t place = 0;
        for (const at::Tensor& t : value.toTensorVector()) visit(t, i, place++);
      }
    }
  }

  // A written operand decides; else the first sharded one.
  void note_reference(const at::Tensor& t, bool is_write, size_t place) {
    if (references_.size() <= place) references_.resize(place + 1);
    auto* state = state_of(t);
    if (!state) return;
    auto& reference = references_[place];
    const bool stronger = !reference.handle.defined() || (is_write && !reference.written) ||
                          (is_sharded(*state) && !is_sharded(*state_of(reference.handle)) && !reference.written);
    if (stronger) reference = {t, is_write};
  }

  bool operand_fits(const at::Tensor& t, size_t arg, size_t place) {
    const auto& value = call_.arg(arg);
    const auto& reference = value.isTensor() && references_.size() > 1 ? any_reference() : references_[place];
    const bool is_write = call_.facts.is_write[arg];
    if (!reference.handle.defined()) return !has_wrapper_key(t);
    if (state_of(t)) {
      if (same_layout(t, reference.handle)) return true;
      return !is_write && t.dim() == 0 && !is_sharded(*state_of(t));
    }
    if (t.dim() == 0) return true;
    if (is_write || has_wrapper_key(t)) return false;
    // A full operand: its own rows suffice for a write to the shard. Out of place the result would mix activations of
    // different ranks, so the parameter is gathered instead.
    return reference.written && broadcasts_to(t, reference.handle.sizes());
  }

  static bool broadcasts_to(const at::Tensor& t, at::IntArrayRef sizes) {
    const auto missing = static_cast<int64_t>(sizes.size()) - t.dim();
    if (missing < 0) return false;
    for (int64_t d = 0; d < t.dim(); ++d)
      if (t.size(d) != 1 && t.size(d) != sizes[d + missing]) return false;
    return true;
  }

  const Reference& any_reference() const {
    return *std::find_if(references_.begin(), references_.end(), [](const auto& r) { return r.handle.defined(); });
  }

  at::Tensor local_operand(const at::Tensor& t, size_t place) {
    if (auto* state = state_of(t)) return state->local();
    if (t.dim() == 0 || references_.size() <= place || !references_[place].handle.defined()) return t;
    const auto& handle = references_[place].handle;
    const auto* state = state_of(handle);
    return own_part(t, handle.sizes(), state->mesh, state->placements);
  }

  at::Tensor wrap(const at::Tensor& local, size_t place) const {
    const auto& handle = references_[place].handle;
    return handle.defined() ? make_like(*state_of(handle), handle.sizes(), local) : local;
  }

  Call& call_;
  std::vector<Reference> references_;
};

// grad += other gradient still in flight: neither waits. Never onto a parameter, whose next gather must see the sum.
bool queue_behind_gradient(Call& call) {
  if (!call.facts.is_add_inplace) return false;
  const auto self = call.tensor(0);
  const auto other = call.tensor(1);
  auto* target = state_of(self);
  auto* term = state_of(other);
  if (!target || !term || target == term || target->owner || target->is_lent || !term->is_pending()) return false;
  if (!same_layout(self, other) || self.dtype() != other.dtype() || call.arg(2).toScalar().toDouble() != 1.0)
    return false;
  ShardState::queue_add(shared_state_of(self), shared_state_of(other));
  self.unsafeGetTensorImpl()->bump_version();
  call.finish(self);
  return true;
}

void reduce_unread(Call& call) {
  c10::SmallVector<ShardState*, 4> partials;
  call.for_each_tensor([&](const at::Tensor& t, size_t) {
    if (auto* state = state_of(t); state && any_partial(state->placements)) partials.push_back(state);
  });
  if (!partials.empty()) reduce_partials(partials, {call.facts.name.c_str(), &partials.front()->path});
}

}  // namespace

bool apply_pointwise(Call& call) {
  if (needs_autograd(call)) return false;
  if (queue_behind_gradient(call)) return true;
  reduce_unread(call);
  if (call.facts.is_addcdiv_inplace) refuse_whole_state(call);
  PointwisePlan plan(call);
  if (!plan.fits()) return false;
  plan.run();
  return true;
}

}  // namespace fsdp::dtensor
