#include "attention/attention_kernels.h"

#include <ATen/ATen.h>

namespace fsdp::attention {
namespace {

// The kernels step through head_dim one by one, whatever the stride says.
at::Tensor with_dense_rows(const at::Tensor& tensor) {
  return tensor.size(-1) == 1 || tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

}  // namespace

at::ScalarType accumulation_dtype(at::ScalarType dtype) { return at::promote_types(dtype, at::kFloat); }

void check_attention_with_lse(const at::Tensor& q, const char* function) {
  TORCH_CHECK_NOT_IMPLEMENTED(q.is_cpu(), function, " has kernels for CPU tensors, but q is on ", q.device(),
                              ": use ulysses_attention, which runs any scaled_dot_product_attention");
}

PartialAttention attention_with_lse(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool is_causal,
                                    std::optional<double> scale) {
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
      with_dense_rows(q), with_dense_rows(k), with_dense_rows(v), /*dropout_p=*/0.0, is_causal, {}, scale);
  return {out, lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_with_lse_backward(
    const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const PartialAttention& whole, bool is_causal, std::optional<double> scale) {
  return at::_scaled_dot_product_flash_attention_for_cpu_backward(
      with_dense_rows(grad_out), with_dense_rows(q), with_dense_rows(k), with_dense_rows(v), whole.out, whole.lse,
      /*dropout_p=*/0.0, is_causal, {}, scale);
}

at::Tensor whole_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool is_causal,
                           std::optional<double> scale, double dropout_p) {
  if (q.is_cpu() && dropout_p == 0.0) {  // scaled_dot_product_attention would choose it too, unless told otherwise
    return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(
        with_dense_rows(q), with_dense_rows(k), with_dense_rows(v), dropout_p, is_causal, {}, scale));
  }
  return at::scaled_dot_product_attention(q, k, v, {}, dropout_p, is_causal, scale, q.size(1) != k.size(1));
}

}  // namespace fsdp::attention
