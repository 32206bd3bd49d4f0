#include "dtensor/registration.h"

#include <ATen/ops/add_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/convolution_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/layer_norm_ops.h>
#include <ATen/ops/linear_ops.h>
#include <ATen/ops/matmul_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/t_ops.h>
#include <torch/library.h>

#include "dtensor/call.h"
#include "dtensor/typed_kernels.h"

namespace fsdp::dtensor {

at::Tensor& add_inplace(at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  if (!has_wrapper_key(self)) {
    Resolver resolver("aten::add_");
    resolver.see(other);
    resolver.gather();
    const c10::impl::ExcludeDispatchKeyGuard exclude(kWrapperKey);
    return at::_ops::add__Tensor::call(self, resolve_argument(resolver, other), alpha);
  }
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::add_", "Tensor");
  torch::jit::Stack stack{self, other, alpha};
  dispatch(op, c10::DispatchKeySet(c10::DispatchKeySet::FULL), &stack);
  return self;
}

namespace {

struct Registration {
  torch::Library any{torch::Library::IMPL, "_", kWrapperKey, __FILE__, __LINE__};
  torch::Library aten{torch::Library::IMPL, "aten", kWrapperKey, __FILE__, __LINE__};

  Registration() {
    any.fallback(torch::CppFunction::makeFromBoxedFunction<&dispatch>());
    namespace ops = at::_ops;
    aten.impl("t", TORCH_FN(Typed<ops::t>::read));
    aten.impl("mm", TORCH_FN(Typed<ops::mm>::read));
    aten.impl("bmm", TORCH_FN(Typed<ops::bmm>::read));
    aten.impl("addmm", TORCH_FN(Typed<ops::addmm>::read));
    aten.impl("matmul", TORCH_FN(Typed<ops::matmul>::read));
    aten.impl("linear", TORCH_FN(Typed<ops::linear>::read));
    aten.impl("embedding", TORCH_FN(Typed<ops::embedding>::read));
    aten.impl("layer_norm", TORCH_FN(Typed<ops::layer_norm>::read));
    aten.impl("convolution", TORCH_FN(Typed<ops::convolution>::read));
    aten.impl("add.Tensor", TORCH_FN(Typed<ops::add_Tensor>::pointwise));
    aten.impl("add_.Tensor", TORCH_FN(add_inplace));
  }
};

}  // namespace

void ensure_dispatch_registered() {
  static const Registration registration = [] {
    TORCH_CHECK(!c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(kWrapperKey),
                "another library, or a second copy of fsdp, already handles the dispatch key ", kWrapperKey,
                ": link fsdp once (as a shared library when several parts of a program use it)");
    return Registration();
  }();
  (void)registration;
}

}  // namespace fsdp::dtensor
