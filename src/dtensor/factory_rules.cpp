// New tensors shaped like a sharded one, and random fills that do not depend on the number of ranks.
#include "dtensor/call.h"
#include "dtensor/layout.h"

namespace fsdp::dtensor {

bool apply_like(Call& call) {
  const auto self = call.tensor(0);
  auto* state = state_of(self);
  if (!state) return apply_metadata(call);  // a gathered view: only its sizes are read
  if (any_partial(state->placements)) return false;
  const PlainScope plain;
  call.arg(0) = state->local();
  call.run();
  auto& result = call.result(0);
  result = make_like(*state, self.sizes(), result.toTensor());
  return true;
}

// The generator runs over the whole tensor, so that a seed means the same values at every world size.
bool apply_random(Call& call) {
  const auto self = call.tensor(0);
  auto* state = state_of(self);
  if (!state || any_partial(state->placements)) return false;
  const PlainScope plain;
  auto local = state->local();
  const auto full = at::empty(self.sizes(), local.options());
  call.arg(0) = full;
  call.run();
  local.copy_(own_part(full, self.sizes(), state->mesh, state->placements));
  self.unsafeGetTensorImpl()->bump_version();
  call.result(0) = self;
  return true;
}

bool apply_random_like(Call& call) {
  const auto self = call.tensor(0);
  auto* state = state_of(self);
  if (!state || any_partial(state->placements)) return false;
  const PlainScope plain;
  call.arg(0) = at::empty(self.sizes(), state->local().options());
  call.run();
  auto& result = call.result(0);
  const auto own = own_part(result.toTensor(), self.sizes(), state->mesh, state->placements).clone();
  result = make_like(*state, self.sizes(), own);
  return true;
}

}  // namespace fsdp::dtensor
