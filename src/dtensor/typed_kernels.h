#pragma once
// Unboxed kernels on the wrapper key for hot ops. They do what the boxed fallback does for an op that only reads, without
// building a stack: about a tenth of the cost.
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
const T& resolve_argument(const Resolver&, const T& value) {
  return value;
}

inline bool is_sharded_value(const at::Tensor& tensor) { return state_of(tensor) != nullptr; }
template <class T>
bool is_sharded_value(const T&) {
  return false;
}

template <class Op, class Signature>
struct TypedKernel;

template <class Op, class Result, class... Args>
struct TypedKernel<Op, Result(Args...)> {
  // For ops that only read: mm, layer_norm, embedding, ...
  static Result read(Args... args) {
    Resolver resolver(Op::name);
    (see_argument(resolver, args), ...);
    resolver.gather();
    const c10::impl::ExcludeDispatchKeyGuard exclude(kWrapperKey);
    return Op::call(resolve_argument(resolver, args)...);
  }

  // For pointwise ops: typed where an activation meets a gathered parameter in a graph, else shard by shard.
  static Result pointwise(Args... args) {
    const bool shardwise = !at::GradMode::is_enabled() && (is_sharded_value(args) || ...);
    return shardwise ? boxed(args...) : read(args...);
  }

  static Result boxed(Args... args) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
    torch::jit::Stack stack;
    (stack.push_back(c10::IValue(args)), ...);
    dispatch(op, c10::DispatchKeySet(c10::DispatchKeySet::FULL), &stack);
    return stack.back().to<Result>();
  }
};

template <class Op>
using Typed = TypedKernel<Op, typename Op::schema>;

// self += other where `self` is an activation: only `other` may be sharded.
at::Tensor& add_inplace(at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha);

}  // namespace fsdp::dtensor
