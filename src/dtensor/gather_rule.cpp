#include "dtensor/call.h"
#include "dtensor/resolver.h"

namespace fsdp::dtensor {

// Any op: gather what it needs, compute plainly, and let the shards follow what it wrote.
void apply_gather(Call& call) {
  Resolver resolver(call.facts.name.c_str());
  call.for_each_tensor([&](const at::Tensor& t, size_t) { resolver.see(t); });
  resolver.gather();

  c10::SmallVector<at::Tensor, 2> written;
  c10::SmallVector<c10::IValue, 4> returned(call.num_returns());
  for (size_t r = 0; call.facts.writes && r < call.num_returns(); ++r) {
    if (call.facts.return_arg[r] >= 0) returned[r] = call.arg(call.facts.return_arg[r]);
  }
  for (size_t i = 0; i < call.num_args(); ++i) {
    call.replace_tensors(i, [&](const at::Tensor& t) {
      if (call.facts.is_write[i]) written.push_back(t);
      return resolver.resolve(t);
    });
  }
  call.run();
  for (const auto& t : written) resolver.write_back(t);
  for (size_t r = 0; call.facts.writes && r < call.num_returns(); ++r) {
    if (!returned[r].isNone()) call.result(r) = returned[r];
  }
}

}  // namespace fsdp::dtensor
