#include "dtensor/call.h"
#include "dtensor/resolver.h"

namespace fsdp::dtensor {

namespace {

bool is_activation(const at::Tensor& tensor) {
  return !has_wrapper_key(tensor) && tensor.dim() > 0 && tensor.is_floating_point();
}

// Mixed precision: what an op sees of a parameter that is lowered for compute. In a graph, and where an op of the table
// or a pointwise op joins it to an activation, it computes; everything else (writes, printing, norms, comparisons, an
// explicit `to`, a plain tensor in the parameter's own dtype that takes its values) asks for the shards' values.
Resolver::Mode mode_of(Call& call) {
  if (call.facts.rule == Rule::kConvert && asks_for_dtype(call)) return Resolver::Mode::kExact;
  std::optional<at::ScalarType> own;  // dtype of the parameter
  bool writes_shards = false;
  bool joins = call.facts.casts_inputs && call.facts.rule != Rule::kPointwise;
  call.for_each_tensor([&](const at::Tensor& t, size_t i) {
    if (state_of(t)) own = t.scalar_type();
    writes_shards = writes_shards || (call.facts.is_write[i] && state_of(t));
    joins = joins || (call.facts.casts_inputs && is_activation(t));
  });
  if (writes_shards) return Resolver::Mode::kMaster;
  if (needs_autograd(call)) return Resolver::Mode::kCompute;
  bool takes_values = false;
  call.for_each_tensor([&](const at::Tensor& t, size_t i) {
    takes_values = takes_values || (call.facts.is_write[i] && !has_wrapper_key(t) && t.scalar_type() == own);
  });
  return joins && !takes_values ? Resolver::Mode::kCompute : Resolver::Mode::kMaster;
}

// Activations follow the parameter's dtype, as part of the graph.
void cast_activations(Call& call, at::ScalarType dtype) {
  const c10::impl::ExcludeDispatchKeyGuard exclude(kWrapperKey);
  for (size_t i = 0; i < call.num_args(); ++i) {
    if (call.facts.is_write[i]) continue;
    Call::map_tensors(call.arg(i), [&](const at::Tensor& t, size_t) { return follow_dtype(t, dtype); });
  }
}

}  // namespace

// Any op: gather what it needs, compute plainly, and let the shards follow what it wrote.
void apply_gather(Call& call) {
  Resolver resolver(call.facts.name.c_str(), mode_of(call));
  call.for_each_tensor([&](const at::Tensor& t, size_t) { resolver.see(t); });
  resolver.gather();

  c10::SmallVector<at::Tensor, 2> written;
  const auto returns = call.written_returns();
  for (size_t i = 0; i < call.num_args(); ++i) {
    call.replace_tensors(i, [&](const at::Tensor& t) {
      if (call.facts.is_write[i]) {
        check_not_lowered(t);
        written.push_back(t);
      }
      return resolver.resolve(t);
    });
  }
  if (resolver.cast_dtype() && call.facts.casts_inputs) cast_activations(call, *resolver.cast_dtype());
  call.run();
  for (const auto& t : written) resolver.write_back(t);
  call.restore(returns);
}

}  // namespace fsdp::dtensor
