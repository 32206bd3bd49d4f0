// Reductions of a sharded tensor to one number. Each rank reduces its part; the ranks meet when somebody reads.
#include <ATen/Dispatch.h>

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

// What takes the place of an empty part, which some ops refuse: one element that changes nothing. The op itself then
// gives it the dtype that it gives to the parts of the other ranks.
at::Tensor neutral_element(const at::Tensor& empty, Reduction reduction, const Partial& partial) {
  const auto filled = [&empty](const at::Scalar& value) { return at::full({1}, value, empty.options()); };
  const bool is_min = partial.reduce_op == "min";
  if (!is_min && reduction != Reduction::kMax) return filled(0);
  if (!at::isIntegralType(empty.scalar_type(), /*includeBool=*/true)) return filled(is_min ? kInfinity : -kInfinity);
  return AT_DISPATCH_INTEGRAL_TYPES_AND(at::kBool, empty.scalar_type(), "neutral_element", [&] {
    using Limits = std::numeric_limits<scalar_t>;
    return filled(is_min ? Limits::max() : Limits::lowest());
  });
}

at::Tensor make_unread(const ShardState& like, const at::Tensor& local, const Partial& partial) {
  Placements placements;
  for (const auto& placement : like.placements)
    placements.push_back(is_shard(placement) ? Placement(partial) : placement);
  return make_sharded(like.mesh, std::move(placements), local, local.sizes(), derived_path(like), like.ledger);
}

// A reduction of values that are themselves unread parts stays unread where it is the same once more: a sum of sums, a
// p-norm of p-norms.
bool stays_unread(const ShardState& state, Reduction reduction, const Partial& partial) {
  const bool repeats = reduction == Reduction::kSum || reduction == Reduction::kMin || reduction == Reduction::kMax ||
                       partial.reduce_op == "norm";
  return std::all_of(state.placements.begin(), state.placements.end(), [&](const Placement& placement) {
    const auto* unread = std::get_if<Partial>(&placement);
    return !unread || (repeats && *unread == partial);
  });
}

// This rank's share in the mean of `numel` elements.
double weight_in_mean(ShardState& state, int64_t numel) {
  return static_cast<double>(state.local().numel()) / static_cast<double>(numel);
}

}  // namespace

// Of one tensor, or of each in a list.
bool apply_reduce(Call& call) {
  if (needs_autograd(call)) return false;
  const auto reduction = call.facts.reduction;
  const auto partial = combination(call);
  if (!partial) return false;
  std::vector<at::Tensor> given;
  call.for_each_tensor([&given](const at::Tensor& t, size_t) { given.push_back(t); });
  const bool fits = std::all_of(given.begin(), given.end(), [&](const at::Tensor& t) {
    return state_of(t) && t.numel() > 0 && stays_unread(*state_of(t), reduction, *partial);
  });
  if (!fits) return false;
  const PlainScope plain;
  Call::map_tensors(call.arg(0), [&](const at::Tensor& t, size_t) {
    const auto& local = state_of(t)->local();
    return local.numel() > 0 ? local : neutral_element(local, reduction, *partial);
  });
  call.run();
  Call::map_tensors(call.result(0), [&](const at::Tensor& part, size_t place) {
    auto& state = *state_of(given[place]);
    const bool is_mean = reduction == Reduction::kMean;
    return make_unread(state, is_mean ? part * weight_in_mean(state, given[place].numel()) : part, *partial);
  });
  return true;
}

bool apply_stack(Call& call) {
  if (needs_autograd(call) || !call.arg(0).isTensorList()) return false;
  const auto tensors = call.arg(0).toTensorVector();
  const auto* first = tensors.empty() ? nullptr : state_of(tensors.front());
  if (!first || !any_partial(first->placements)) return false;
  if (std::any_of(first->placements.begin(), first->placements.end(), is_shard)) return false;
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
  call.result(0) = make_like(*first, local.sizes(), local);
  return true;
}

}  // namespace fsdp::dtensor
