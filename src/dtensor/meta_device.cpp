#include "dtensor/meta_device.h"

#include <fsdp/materialize.h>

#include "dtensor/registration.h"

namespace fsdp::dtensor {

bool is_under_meta_guard(Call& call) {
  if (!c10::impl::tls_is_dispatch_key_included(kWrapperKey)) return false;
  bool is_wrapped = false;
  call.for_each_tensor([&](const at::Tensor& t, size_t) { is_wrapped = is_wrapped || has_wrapper_key(t); });
  return !is_wrapped;
}

void run_under_meta_guard(Call& call) {
  bool takes_tensors = false;
  call.for_each_tensor([&](const at::Tensor&, size_t) { takes_tensors = true; });
  const auto& arguments = call.op.schema().arguments();
  for (size_t i = 0; i < arguments.size() && !takes_tensors; ++i) {
    if (arguments[i].name() == "device" && call.arg(i).isNone()) call.arg(i) = c10::Device(c10::kMeta);
  }
  call.run();
}

}  // namespace fsdp::dtensor

namespace fsdp {

namespace {
c10::DispatchKeySet keys_of_meta_guard() {
  dtensor::ensure_dispatch_registered();
  return c10::DispatchKeySet(dtensor::kWrapperKey);
}
}  // namespace

MetaDeviceGuard::MetaDeviceGuard() : guard_(keys_of_meta_guard()) {}

}  // namespace fsdp
