#include "dtensor/registration.h"

#include <ATen/ops/add_ops.h>
#include <ATen/ops/addcdiv_ops.h>
#include <ATen/ops/addcmul_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/convolution_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/layer_norm_ops.h>
#include <ATen/ops/linear_ops.h>
#include <ATen/ops/matmul_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/sqrt_ops.h>
#include <ATen/ops/t_ops.h>
#include <torch/library.h>

#include "dtensor/call.h"
#include "dtensor/typed_kernels.h"
#include "dtensor/whole_state.h"

namespace fsdp::dtensor {

namespace {

// self += other, where `self` is an activation and `other` a bias, or both are gradients and `other` is still in
// flight.
at::Tensor& add_inplace(at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  if (!has_wrapper_key(self)) {
    if (!at::GradMode::is_enabled()) warn_of_whole_sum(self, other);
    // Outside of a graph a plain tensor in the parameter's own dtype asks for its values (an average of weights).
    const bool takes_values = !at::GradMode::is_enabled() && self.scalar_type() == other.scalar_type();
    Resolver resolver("aten::add_", takes_values ? Resolver::Mode::kMaster : Resolver::Mode::kCompute);
    resolver.see(other);
    resolver.gather();
    const c10::impl::ExcludeDispatchKeyGuard exclude(kWrapperKey);
    auto term = resolve_argument(resolver, other);
    if (resolver.cast_dtype() && !takes_values) term = cast_argument(*resolver.cast_dtype(), term);
    return at::_ops::add__Tensor::call(self, term, alpha);
  }
  const auto* term = state_of(other);
  if (term && term->is_pending()) {
    run_boxed<at::_ops::add__Tensor>(self, other, alpha);
    return self;
  }
  return Inplace<at::_ops::add__Tensor>::pointwise(self, other, alpha);
}

// A residual or position added to an activation reads; anything else goes part by part.
at::Tensor add(const at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  const bool in_graph = at::GradMode::is_enabled() && (self.requires_grad() || other.requires_grad());
  return in_graph ? Typed<at::_ops::add_Tensor>::read(self, other, alpha)
                  : Typed<at::_ops::add_Tensor>::pointwise(self, other, alpha);
}

struct Registration {
  torch::Library any{torch::Library::IMPL, "_", kWrapperKey, __FILE__, __LINE__};
  torch::Library aten{torch::Library::IMPL, "aten", kWrapperKey, __FILE__, __LINE__};

  Registration() {
    any.fallback(torch::CppFunction::makeFromBoxedFunction<&dispatch>());
    namespace ops = at::_ops;
    aten.impl("t", TORCH_FN(Typed<ops::t>::view));
    aten.impl("mm", TORCH_FN(Typed<ops::mm>::read));
    aten.impl("bmm", TORCH_FN(Typed<ops::bmm>::read));
    aten.impl("addmm", TORCH_FN(Typed<ops::addmm>::read));
    aten.impl("matmul", TORCH_FN(Typed<ops::matmul>::read));
    aten.impl("linear", TORCH_FN(Typed<ops::linear>::read));
    aten.impl("embedding", TORCH_FN(Typed<ops::embedding>::read));
    aten.impl("layer_norm", TORCH_FN(Typed<ops::layer_norm>::read));
    aten.impl("convolution", TORCH_FN(Typed<ops::convolution>::read));
    aten.impl("add.Tensor", TORCH_FN(add));
    aten.impl("add_.Tensor", TORCH_FN(add_inplace));
    // What optimizers issue for each parameter.
    aten.impl("mul_.Tensor", TORCH_FN(Inplace<ops::mul__Tensor>::pointwise));
    aten.impl("mul_.Scalar", TORCH_FN(Inplace<ops::mul__Scalar>::pointwise));
    aten.impl("addcmul_", TORCH_FN(Inplace<ops::addcmul_>::pointwise));
    aten.impl("addcdiv_", TORCH_FN(Inplace<ops::addcdiv_>::pointwise));
    aten.impl("add_.Scalar", TORCH_FN(Inplace<ops::add__Scalar>::pointwise));
    aten.impl("sqrt", TORCH_FN(Typed<ops::sqrt>::pointwise));
    aten.impl("div.Scalar", TORCH_FN(Typed<ops::div_Scalar>::pointwise));
    aten.impl("div.Tensor", TORCH_FN(Typed<ops::div_Tensor>::pointwise));
  }
};

}  // namespace

void check_key_is_free(c10::DispatchKey key) {
  TORCH_CHECK(!c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(key),
              "another library, or a second copy of fsdp, already handles the dispatch key ", key,
              ": link fsdp once (as a shared library when several parts of a program use it)");
}

void ensure_dispatch_registered() {
  static const Registration registration = [] {
    check_key_is_free(kWrapperKey);
    return Registration();
  }();
  (void)registration;
}

}  // namespace fsdp::dtensor
