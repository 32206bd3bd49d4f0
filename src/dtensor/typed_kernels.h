#pragma once
// Unboxed kernels on the wrapper key for hot ops. They do what the boxed fallback does for an op that only reads,
// without building a stack: about a tenth of the cost.
#include <ATen/core/dispatch/Dispatcher.h>

#include "dtensor/call.h"
#include "dtensor/resolver.h"

namespace fsdp::dtensor {

inline void see_argument(Resolver& resolver, const at::Tensor& tensor) { resolver.see(tensor); }
inline void see_argument(Resolver& resolver, const std::optional<at::Tensor>& tensor) {
  if (tensor) resolver.see(*tensor);
}
template <class T>
void see_argument(Resolver&, const T&) {}

inline at::Tensor resolve_argument(const Resolver& resolver, const at::Tensor& tensor) {
  return has_wrapper_key(tensor) ? resolver.resolve(tensor) : tensor;
}
inline std::optional<at::Tensor> resolve_argument(const Resolver& resolver, const std::optional<at::Tensor>& tensor) {
  return tensor ? std::optional(resolve_argument(resolver, *tensor)) : tensor;
}
template <class T>
T resolve_argument(const Resolver&, const T& value) {
  return value;
}

inline at::Tensor cast_argument(at::ScalarType dtype, const at::Tensor& tensor) { return follow_dtype(tensor, dtype); }
inline std::optional<at::Tensor> cast_argument(at::ScalarType dtype, const std::optional<at::Tensor>& tensor) {
  return tensor && tensor->defined() ? std::optional(cast_argument(dtype, *tensor)) : tensor;
}
template <class T>
const T& cast_argument(at::ScalarType, const T& value) {
  return value;
}

// Runs an op on a boxed stack through the rules.
template <class Op, class... Args>
c10::IValue run_boxed(const Args&... args) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
  torch::jit::Stack stack{c10::IValue(args)...};
  dispatch(op, c10::DispatchKeySet(c10::DispatchKeySet::FULL), &stack);
  return stack.back();
}

// The first sharded tensor among the arguments of a pointwise op; null when an argument does not go part by part with
// it.
class ShardwiseOperands {
 public:
  template <class... Args>
  explicit ShardwiseOperands(const Args&... args) {
    (consider(args), ...);
    if (at::GradMode::is_enabled() && requires_grad_) fits_ = false;
  }
  [[nodiscard]] const at::Tensor* reference() const { return fits_ ? reference_ : nullptr; }

 private:
  void consider(const at::Tensor& tensor) {
    requires_grad_ = requires_grad_ || tensor.requires_grad();
    const auto* state = state_of(tensor);
    if (!state) {
      fits_ = fits_ && tensor.dim() == 0 && !has_wrapper_key(tensor);
    } else if (!is_shard(state->placements.back())) {
      fits_ = false;  // an unread reduction, or replicated: the boxed rule knows what to do
    } else if (!reference_) {
      reference_ = &tensor;
    } else {
      fits_ = fits_ && same_layout(tensor, *reference_);
    }
  }
  template <class T>
  void consider(const T&) {}

  const at::Tensor* reference_ = nullptr;
  bool fits_ = true;
  bool requires_grad_ = false;
};

inline at::Tensor local_argument(const at::Tensor& tensor) {
  auto* state = state_of(tensor);
  return state ? state->local() : tensor;
}
template <class T>
T local_argument(const T& value) {
  return value;
}

template <class Op, class Signature>
struct TypedKernel;

template <class Op, class Result, class... Args>
struct TypedKernel<Op, Result(Args...)> {
  // For ops that only read: mm, layer_norm, embedding, ...
  static Result read(Args... args) { return on_gathered</*kCasts=*/true>(args...); }

  // For views: nothing is cast before an activation is met.
  static Result view(Args... args) { return on_gathered</*kCasts=*/false>(args...); }

  // For pointwise ops that return a new tensor. A sharded operand in a graph is gathered, as by read().
  static at::Tensor pointwise(Args... args) {
    const ShardwiseOperands operands(args...);
    if (const auto* reference = operands.reference()) {
      const PlainScope plain;
      return make_like(*state_of(*reference), reference->sizes(), Op::call(local_argument(args)...));
    }
    return run_boxed<Op>(args...).toTensor();
  }

 private:
  template <bool kCasts>
  static Result on_gathered(const Args&... args) {
    Resolver resolver(Op::name);
    (see_argument(resolver, args), ...);
    resolver.gather();
    const c10::impl::ExcludeDispatchKeyGuard exclude(kWrapperKey);
    if constexpr (kCasts) {
      if (const auto dtype = resolver.cast_dtype())
        return Op::call(cast_argument(*dtype, resolve_argument(resolver, args))...);
    }
    return Op::call(resolve_argument(resolver, args)...);
  }
};

// The same for in-place pointwise ops: self is the parameter, gradient or optimizer state.
template <class Op, class Signature>
struct TypedInplace;

template <class Op, class... Args>
struct TypedInplace<Op, at::Tensor&(at::Tensor&, Args...)> {
  static at::Tensor& pointwise(at::Tensor& self, Args... args) {
    const ShardwiseOperands operands(self, args...);
    if (operands.reference() && state_of(self)) {
      const PlainScope plain;
      auto local = state_of(self)->local();
      Op::call(local, local_argument(args)...);
      self.unsafeGetTensorImpl()->bump_version();
    } else {
      run_boxed<Op>(self, args...);
    }
    return self;
  }
};

template <class Op>
using Typed = TypedKernel<Op, typename Op::schema>;
template <class Op>
using Inplace = TypedInplace<Op, typename Op::schema>;

}  // namespace fsdp::dtensor
