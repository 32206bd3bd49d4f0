#include <ATen/record_function.h>

#include "dtensor/call.h"
#include "dtensor/meta_device.h"
#include "dtensor/resolver.h"

namespace fsdp::dtensor {

namespace {

// Also for a view of a gathered tensor: the shards would not follow either.
void refuse(Call& call) {
  std::string path = "?";
  call.for_each_tensor([&](const at::Tensor& t, size_t) {
    if (const auto* state = state_of(t))
      path = state->path;
    else if (const auto* storage = gathered_storage_of(t))
      path = storage->owner->path(storage->index);
  });
  TORCH_CHECK_NOT_IMPLEMENTED(false, call.facts.name, " of the sharded tensor '", path,
                              "' is refused: ", call.facts.refusal);
}

bool apply_rule(Call& call) {
  switch (call.facts.rule) {
    case Rule::kGather:
      return false;
    case Rule::kAlias:
      return apply_alias(call);
    case Rule::kNothing:
      return apply_nothing(call);
    case Rule::kMetadata:
      return apply_metadata(call);
    case Rule::kLocal:
      return apply_local(call);
    case Rule::kShape:
      return apply_shape(call);
    case Rule::kPointwise:
      return apply_pointwise(call);
    case Rule::kLike:
      return apply_like(call);
    case Rule::kRandom:
      return apply_random(call);
    case Rule::kRandomLike:
      return apply_random_like(call);
    case Rule::kReduce:
      return apply_reduce(call);
    case Rule::kStack:
      return apply_stack(call);
    case Rule::kConvert:
      return apply_convert(call);
    case Rule::kShallowCopy:
      return apply_shallow_copy(call);
    case Rule::kSet:
      return apply_set(call);
    case Rule::kRefuse:
      refuse(call);
  }
  return false;
}

void check_all_writable(Call& call) {
  if (!at::GradMode::is_enabled() || !call.facts.writes) return;
  call.for_each_tensor([&](const at::Tensor& t, size_t i) {
    if (call.facts.is_write[i]) check_writable(t);
  });
}

}  // namespace

void dispatch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  Call call(op, keys, *stack);
  RECORD_FUNCTION("FSDP::intercept (" + call.facts.name + ")", c10::ArrayRef<const c10::IValue>{});
  if (is_under_meta_guard(call)) return run_under_meta_guard(call);
  if (call.facts.rule != Rule::kMetadata && call.facts.rule != Rule::kNothing) check_all_writable(call);
  if (!apply_rule(call)) apply_gather(call);
}

}  // namespace fsdp::dtensor
