// Ops that act on the handle itself: its flags, its sizes, its identity.
#include "dtensor/call.h"
#include "dtensor/layout.h"
#include "dtensor/resolver.h"

namespace fsdp::dtensor {

namespace {

// Whether a conversion (to, contiguous, cpu) leaves `tensor` as it is.
bool changes_nothing(Call& call, const at::Tensor& tensor) {
  const auto& arguments = call.op.schema().arguments();
  for (size_t i = 1; i < arguments.size(); ++i) {
    const auto& value = call.arg(i);
    if (value.isNone()) continue;
    const auto& name = arguments[i].name();
    if (name == "dtype" && value.toScalarType() != tensor.scalar_type()) return false;
    if (name == "device" && value.toDevice() != tensor.device()) return false;
    if (name == "layout" && value.toLayout() != tensor.layout()) return false;
    if (name == "copy" && value.toBool()) return false;
    if (name == "memory_format") {
      const auto format = static_cast<at::MemoryFormat>(value.toInt());
      if (format != at::MemoryFormat::Preserve && format != at::MemoryFormat::Contiguous) return false;
    }
  }
  return true;
}

// A full, plain tensor for any tensor.
at::Tensor plain_value(const at::Tensor& tensor, const char* op) {
  Resolver resolver(op);
  resolver.see(tensor);
  resolver.gather();
  return resolver.resolve(tensor);
}

// `state` takes this rank's part of `full`; dtype and device follow it.
void take_over(ShardState& state, const at::Tensor& full) {
  const PlainScope plain;
  const auto own = own_part(full.detach(), full.sizes(), state.mesh, state.placements);
  auto local = state.local();
  if (own.scalar_type() == local.scalar_type() && own.device() == local.device()) {
    local.copy_(own);
    return;
  }
  state.set_local(own.clone(at::MemoryFormat::Contiguous));
  if (state.owner) state.owner->replaced(state.index);
}

// torch::load() arrives as set_() on the same device and as set_data() otherwise, so the message speaks of it.
void check_same_shape(const ShardState& state, const at::Tensor& self, const at::Tensor& source, const char* what) {
  TORCH_CHECK_VALUE(source.sizes() == self.sizes(), "loading the sharded tensor '", state.path, "' (torch::load() or ",
                    what, "): it has the shape ", self.sizes(), ", the given values ", source.sizes(),
                    "; the file or value is that of another model");
}

}  // namespace

bool apply_alias(Call& call) {
  const auto self = call.tensor(0);
  if (!state_of(self)) return false;
  if (call.facts.name != "aten::detach" && needs_autograd(call)) return false;
  call.finish(alias_handle(self));
  return true;
}

bool apply_nothing(Call& call) {
  const auto self = call.tensor(0);
  if (!state_of(self)) return false;
  call.finish(self);
  return true;
}

bool apply_metadata(Call& call) {
  call.pass_through();
  return true;
}

bool apply_local(Call& call) {
  auto* state = state_of(call.tensor(0));
  if (!state) return false;
  call.arg(0) = state->local();
  call.run();
  return true;
}

bool apply_shape(Call& call) {
  const auto self = call.tensor(0);
  if (!has_wrapper_key(self)) return apply_metadata(call);
  const auto other = call.tensor(1);
  if (has_wrapper_key(other)) {  // only looked at: a stand-in without values will do
    const PlainScope plain;
    call.arg(1) = at::empty({1}, other.options()).expand(other.sizes());
  }
  return false;
}

bool apply_convert(Call& call) {
  const auto self = call.tensor(0);
  const auto* state = state_of(self);
  if (!state || !changes_nothing(call, self)) return false;
  // An explicit dtype asks for the values of a parameter that compute sees in another one. (An alias does not require
  // grad: Module::to goes through one.)
  const bool is_lowered = state->owner && state->owner->precision(state->index).is_lowered;
  if (is_lowered && self.requires_grad() && asks_for_dtype(call)) return false;
  call.finish(self);
  return true;
}

// Tensor::set_data is not an operator; what reaches the key is the check in front of it. When it passes, set_data makes
// `self` a shallow copy of `from`, so `from` becomes a handle of self's state here.
bool apply_shallow_copy(Call& call) {
  const auto self = call.tensor(0);
  auto from = call.tensor(1);
  const auto state = shared_state_of(self);
  if (!state) {
    TORCH_CHECK_NOT_IMPLEMENTED(!state_of(from), "copying a sharded module or tensor is refused: '",
                                state_of(from)->path,
                                "' is sharded and the target is not. Use full_tensor(), or "
                                "fsdp::full_state_dict(module), or build the copy and shard it by itself");
    return apply_metadata(call);
  }
  if (!from.is_same(self) && state_of(from) != state.get()) {
    check_same_shape(*state, self, from, "set_data()");
    auto* source = state_of(from);
    if (source && source->placements == state->placements && source->mesh == state->mesh) {
      const PlainScope plain;
      state->set_local(source->local().clone());
      if (state->owner) state->owner->replaced(state->index);
    } else {
      take_over(*state, plain_value(from, "aten::set_data"));
    }
    refresh_handle(self, from);
  }
  call.finish(true);
  return true;
}

bool apply_set(Call& call) {
  const auto self = call.tensor(0);
  const auto state = shared_state_of(self);
  const auto* source_state = call.num_args() > 1 ? state_of(call.tensor(1)) : nullptr;
  TORCH_CHECK_NOT_IMPLEMENTED(state && call.op.schema().overload_name() == "source_Tensor", call.facts.name,
                              " involving the sharded tensor '",
                              state          ? state->path
                              : source_state ? source_state->path
                                             : "?",
                              "' is refused: its storage belongs to the mesh. Use copy_() under torch::NoGradGuard");
  const auto source = call.tensor(1);
  check_same_shape(*state, self, source, "set_()");
  if (state_of(source) != state.get()) take_over(*state, plain_value(source, "aten::set_"));
  if (self.scalar_type() != state->local().scalar_type()) refresh_handle(self, self);
  self.unsafeGetTensorImpl()->bump_version();
  call.finish(self);
  return true;
}

}  // namespace fsdp::dtensor
