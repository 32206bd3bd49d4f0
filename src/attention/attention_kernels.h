#pragma once
// LibTorch's attention kernels, chosen in this place only.
#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace fsdp::attention {

struct PartialAttention {
  at::Tensor out;  // [B, H, S_q, D]
  at::Tensor lse;  // [B, H, S_q], the log-sum-exp over the keys; float, or double for double inputs
};

// The dtype in which partial results are added.
[[nodiscard]] at::ScalarType accumulation_dtype(at::ScalarType dtype);

// Errors: c10::NotImplementedError where no kernel here returns a log-sum-exp with a backward that takes one.
void check_attention_with_lse(const at::Tensor& q, const char* function);

// Without graph. Causal: query i sees keys 0 .. i. Neither side may be empty. Lengths and numbers of heads may differ.
[[nodiscard]] PartialAttention attention_with_lse(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                  bool is_causal, std::optional<double> scale);

// Gradients of q, k and v as far as these keys go, when `whole` is the result over all keys.
[[nodiscard]] std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_with_lse_backward(
    const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const PartialAttention& whole, bool is_causal, std::optional<double> scale);

// Differentiable, over whole sequences. Never of size [S, S] on the CPU without dropout.
[[nodiscard]] at::Tensor whole_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool is_causal,
                                         std::optional<double> scale, double dropout_p);

}  // namespace fsdp::attention
