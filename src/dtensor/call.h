#pragma once
// One intercepted call: the operator, what is known about it, and its arguments on the stack.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "dtensor/op_facts.h"
#include "dtensor/shard_state.h"

namespace fsdp::dtensor {

class Call {
 public:
  Call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack& stack)
      : op(op), facts(facts_of(op)), keys_(keys), stack_(stack), base_(stack.size() - facts.is_write.size()) {}

  const c10::OperatorHandle& op;
  const OpFacts& facts;

  [[nodiscard]] size_t num_args() const { return facts.is_write.size(); }
  [[nodiscard]] c10::IValue& arg(size_t i) { return stack_[base_ + i]; }
  [[nodiscard]] at::Tensor tensor(size_t i) { return arg(i).isTensor() ? arg(i).toTensor() : at::Tensor(); }
  [[nodiscard]] size_t num_returns() const { return facts.return_arg.size(); }
  [[nodiscard]] c10::IValue& result(size_t i) { return stack_[stack_.size() - num_returns() + i]; }

  // What the op returns of its own arguments (in-place, out=), to be put back after run(), when those were replaced.
  [[nodiscard]] c10::SmallVector<c10::IValue, 4> written_returns() {
    c10::SmallVector<c10::IValue, 4> returns(num_returns());
    for (size_t r = 0; r < num_returns(); ++r)
      if (facts.return_arg[r] >= 0) returns[r] = arg(static_cast<size_t>(facts.return_arg[r]));
    return returns;
  }
  void restore(c10::ArrayRef<c10::IValue> returns) {
    for (size_t r = 0; r < num_returns(); ++r)
      if (facts.return_arg[r] >= 0) result(r) = returns[r];
  }

  // Ends the call with one value, without running the op.
  void finish(c10::IValue value) {
    stack_.resize(base_);
    stack_.push_back(std::move(value));
  }
  // Runs the op on the arguments as they are now; nested ops are plain.
  void run() {
    const c10::impl::ExcludeDispatchKeyGuard exclude(kWrapperKey);
    op.callBoxed(&stack_);
  }
  // Runs the op below the wrapper key on the handles themselves; nested ops are intercepted again, as user code may be
  // among them.
  void pass_through() {
    op.redispatchBoxed(keys_ & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kWrapperKey), &stack_);
  }

  // visit(tensor, i) for every defined tensor of argument i, lists included.
  template <class Visit>
  void for_each_tensor(const Visit& visit) {
    for (size_t i = 0; i < num_args(); ++i) for_each_tensor_of(arg(i), [&](const at::Tensor& t) { visit(t, i); });
  }
  // Replaces every defined tensor in `value` by change(tensor, its place in the list).
  template <class Change>
  static void map_tensors(c10::IValue& value, const Change& change) {
    const auto map_one = [&change](const at::Tensor& t, size_t place) { return t.defined() ? change(t, place) : t; };
    size_t place = 0;
    if (value.isTensor()) {
      value = map_one(value.toTensor(), place);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(map_one(t, place++));
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::impl::GenericList list(value.toList().elementType());
      for (const auto& item : value.toListRef()) {
        list.push_back(item.isTensor() ? c10::IValue(map_one(item.toTensor(), place)) : item);
        ++place;
      }
      value = list;
    }
  }
  // Replaces every tensor of argument i that carries the wrapper key by change(tensor).
  template <class Change>
  void replace_tensors(size_t i, const Change& change) {
    map_tensors(arg(i), [&change](const at::Tensor& t, size_t) { return has_wrapper_key(t) ? change(t) : t; });
  }

 private:
  template <class Visit>
  static void for_each_tensor_of(const c10::IValue& value, const Visit& visit) {
    if (value.isTensor()) {
      if (value.toTensor().defined()) visit(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorVector()) visit(t);
    } else if (value.isList()) {
      for (const auto& item : value.toListRef()) for_each_tensor_of(item, visit);
    }
  }

  c10::DispatchKeySet keys_;
  torch::jit::Stack& stack_;
  size_t base_;
};

[[nodiscard]] inline bool needs_autograd(Call& call) {
  if (!at::GradMode::is_enabled()) return false;
  bool any = false;
  call.for_each_tensor([&](const at::Tensor& t, size_t) { any = any || t.requires_grad(); });
  return any;
}

// to(kFloat), also where it changes nothing.
[[nodiscard]] inline bool asks_for_dtype(Call& call) {
  const auto& arguments = call.op.schema().arguments();
  for (size_t i = 1; i < arguments.size(); ++i)
    if (arguments[i].name() == "dtype" && !call.arg(i).isNone()) return true;
  return false;
}

// Whether two sharded tensors can be combined part by part.
[[nodiscard]] inline bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  const auto* x = state_of(a);
  const auto* y = state_of(b);
  return a.sizes() == b.sizes() && x->placements == y->placements && x->mesh == y->mesh;
}

// The rules. Each returns false when it does not apply to these arguments; then the op is computed on gathered tensors.
bool apply_pointwise(Call& call);     // pointwise_rule.cpp
bool apply_like(Call& call);          // factory_rules.cpp
bool apply_random(Call& call);        //
bool apply_random_like(Call& call);   //
bool apply_reduce(Call& call);        // reduce_rule.cpp
bool apply_stack(Call& call);         //
bool apply_convert(Call& call);       // handle_rules.cpp
bool apply_shape(Call& call);         //
bool apply_metadata(Call& call);      //
bool apply_local(Call& call);         //
bool apply_alias(Call& call);         //
bool apply_nothing(Call& call);       //
bool apply_shallow_copy(Call& call);  //
bool apply_set(Call& call);           //
void apply_gather(Call& call);        // gather_rule.cpp

// The boxed fallback on the wrapper key.
void dispatch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace fsdp::dtensor
