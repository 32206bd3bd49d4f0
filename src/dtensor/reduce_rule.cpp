// Reductions of a sharded tensor to one number. Each rank reduces its part; the ranks meet when somebody reads.
#include <cmath>
#include <limits>

#include "dtensor/call.h"
#include "dtensor/layout.h"

namespace fsdp::dtensor {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// How the parts of all ranks combine; nullopt when no rule is known for these arguments.
std::optional<Partial> combination(Call& call) {
  switch (call.facts.reduction) {
    case Reduction::kSum:
    case Reduction::kMean:
      return Partial{"sum"};
    case Reduction::kMin:
    case Reduction::kAll:
      return Partial{"min"};
    case Reduction::kMax:
    case Reduction::kAny:
      return Partial{"max"};
    case Reduction::kNorm:
      break;
    case Reduction::kNone:
      return std::nullopt;
  }
  const auto& arguments = call.op.schema().arguments();
  double p = 2.0;
  for (size_t i = 1; i < arguments.size(); ++i) {
    const auto& value = call.arg(i);
    const auto& name = arguments[i].name();
    if ((name == "p" || name == "ord") && !value.isNone()) p = value.toScalar().toDouble();
    if (name == "dim" && !value.isNone()) return std::nullopt;
    if (name == "keepdim" && value.toBool()) return std::nullopt;
  }
  if (p == -kInfinity) return Partial{"min"};
  if (p == 0) return Partial{"sum"};
  if (p < 0) return std::nullopt;
  return Partial{"norm", p};
}

// What a rank without rows contributes where the op itself refuses an empty tensor.
at::Tensor identity(const at::Tensor& local, const Partial& partial) {
  if (partial.reduce_op == "norm" || partial.reduce_op == "sum") return at::zeros({}, local.options());
  const bool is_min = partial.reduce_op == "min";
  if (local.is_floating_point()) return at::full({}, is_min ? kInfinity : -kInfinity, local.options());
  const auto limit = is_min ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int64_t>::lowest();
  return at::full({}, limit, local.options().dtype(at::kLong)).to(local.scalar_type());
}

// The part of `state` reduced on this rank by the op of `call`, whose first argument is replaced.
at::Tensor reduce_local(Call& call, const at::Tensor& local, int64_t global_numel, const Partial& partial) {
  const auto reduction = call.facts.reduction;
  const bool refuses_empty = reduction == Reduction::kMin || reduction == Reduction::kMax ||
                             (reduction == Reduction::kNorm && std::isinf(partial.norm_type));
  if (local.numel() == 0 && (refuses_empty || partial.reduce_op == "min")) {
    if (reduction != Reduction::kAll) {
      call.finish(identity(local, partial));
      return call.result(0).toTensor();
    }
  }
  if (reduction == Reduction::kMean) {
    const auto dtype = call.arg(1).isNone() ? std::optional<at::ScalarType>() : call.arg(1).toScalarType();
    TORCH_CHECK(dtype || local.is_floating_point() || local.is_complex(),
                "mean(): could not infer output dtype. Input dtype must be either a floating point or complex dtype");
    call.finish(at::sum(local, dtype) / global_numel);
    return call.result(0).toTensor();
  }
  call.arg(0) = local;
  call.run();
  return call.result(0).toTensor();
}

at::Tensor make_unread(const ShardState& like, at::Tensor local, const Partial& partial) {
  Placements placements;
  for (const auto& placement : like.placements)
    placements.push_back(is_shard(placement) ? Placement(partial) : placement);
  const auto sizes = local.sizes().vec();
  auto state = std::make_shared<ShardState>(like.mesh, std::move(placements), std::move(local), derived_path(like));
  state->ledger = like.ledger;
  return make_handle(std::move(state), sizes);
}

// A reduction of values that are themselves unread parts: stays unread when both combine alike.
bool combines_with(const ShardState& state, const Partial& partial) {
  return std::all_of(state.placements.begin(), state.placements.end(), [&](const Placement& placement) {
    const auto* unread = std::get_if<Partial>(&placement);
    return !unread || *unread == partial;
  });
}

bool reduce_list(Call& call, const Partial& partial) {
  const auto tensors = call.arg(0).toTensorVector();
  for (const auto& t : tensors) {
    const auto* state = state_of(t);
    if (!state || any_partial(state->placements)) return false;
  }
  std::vector<at::Tensor> results;
  {
    const PlainScope plain;
    for (const auto& t : tensors) {
      auto* state = state_of(t);
      const auto& local = state->local();
      const bool empty_inf = local.numel() == 0 && std::isinf(partial.norm_type);
      const auto norm = empty_inf ? identity(local, partial) : at::norm(local, call.arg(1).toScalar());
      results.push_back(make_unread(*state, norm, partial));
    }
  }
  call.finish(results);
  return true;
}

}  // namespace

bool apply_reduce(Call& call) {
  if (needs_autograd(call)) return false;
  const auto partial = combination(call);
  if (!partial) return false;
  if (call.arg(0).isTensorList()) return reduce_list(call, *partial);
  const auto self = call.tensor(0);
  auto* state = state_of(self);
  if (!state || !combines_with(*state, *partial)) return false;
  if (call.facts.reduction == Reduction::kMean && any_partial(state->placements)) return false;
  const PlainScope plain;
  auto local = reduce_local(call, state->local(), self.numel(), *partial);
  call.result(0) = make_unread(*state, std::move(local), *partial);
  return true;
}

bool apply_stack(Call& call) {
  if (needs_autograd(call) || !call.arg(0).isTensorList()) return false;
  const auto tensors = call.arg(0).toTensorVector();
  const auto* first = tensors.empty() ? nullptr : state_of(tensors.front());
  if (!first || !any_partial(first->placements)) return false;
  std::vector<at::Tensor> locals;
  for (const auto& t : tensors) {
    auto* state = state_of(t);
    if (!state || state->placements != first->placements || !(state->mesh == first->mesh)) return false;
    locals.push_back(state->local());
  }
  const PlainScope plain;
  call.arg(0) = locals;
  call.run();
  const auto local = call.result(0).toTensor();
  call.result(0) = make_unread(*first, local, Partial{});
  return true;
}

}  // namespace fsdp::dtensor
