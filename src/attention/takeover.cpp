#include "attention/takeover.h"

#include <fsdp/ulysses_attention.h>
#include <torch/library.h>

#include "dtensor/registration.h"

namespace fsdp::attention {

namespace {

// LibTorch gives it neither kernel nor fallback.
constexpr auto kTakeoverKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

std::vector<int64_t> ranks_along(const DeviceMesh& mesh) {
  const auto ranks = mesh.mesh().contiguous();
  return {ranks.const_data_ptr<int64_t>(), ranks.const_data_ptr<int64_t>() + ranks.numel()};
}

// [H, S, D] is a batch of one.
at::Tensor with_batch(const at::Tensor& tensor) { return tensor.dim() == 3 ? tensor.unsqueeze(0) : tensor; }

at::Tensor scaled_dot_product_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                        const std::optional<at::Tensor>& attn_mask, double dropout_p, bool is_causal,
                                        std::optional<double> scale, bool enable_gqa) {
  auto* scheme = static_cast<ActiveScheme*>(mesh::SequenceScope::active());
  TORCH_CHECK(scheme, "scaled_dot_product_attention was taken over, but no context_parallel scope is active");
  TORCH_CHECK_NOT_IMPLEMENTED(!attn_mask || !attn_mask->defined(),
                              "scaled_dot_product_attention with attn_mask inside context_parallel: a mask of the "
                              "whole sequence does not fit its parts. Use is_causal, or pad the sequence at its end");
  TORCH_CHECK_VALUE(q.dim() == 3 || q.dim() == 4,
                    "scaled_dot_product_attention inside context_parallel takes q "
                    "[B, H, S, D] or [H, S, D], got ",
                    q.sizes());
  TORCH_CHECK_VALUE(k.dim() == q.dim() && v.dim() == q.dim(),
                    "scaled_dot_product_attention inside context_parallel takes q, k and v of as many dims, got ",
                    q.sizes(), ", ", k.sizes(), " and ", v.sizes());
  const c10::impl::ExcludeDispatchKeyGuard plain(kTakeoverKey);  // for the attention that the scheme itself calls
  const auto result =
      scheme->attend(with_batch(q), with_batch(k), with_batch(v), dropout_p, is_causal, scale, enable_gqa);
  return q.dim() == 3 ? result.squeeze(0) : result;
}

struct Registration {
  torch::Library any{torch::Library::IMPL, "_", kTakeoverKey, __FILE__, __LINE__};
  torch::Library aten{torch::Library::IMPL, "aten", kTakeoverKey, __FILE__, __LINE__};

  Registration() {
    any.fallback(torch::CppFunction::makeFallthrough());
    aten.impl("scaled_dot_product_attention", TORCH_FN(scaled_dot_product_attention));
  }
};

void ensure_registered() {
  static const Registration registration = [] {
    dtensor::check_key_is_free(kTakeoverKey);
    return Registration();
  }();
  (void)registration;
}

}  // namespace

ActiveScheme::ActiveScheme(const DeviceMesh& mesh, const ContextParallelOptions& options,
                           std::vector<at::Tensor> buffers, std::optional<int64_t> sequence_length)
    : SequenceScope(ranks_along(mesh), std::move(buffers)),
      mesh_(mesh),
      method_(options.method),
      split_(options.split.value_or(options.method == ContextParallelMethod::kRing ? SequenceSplit::kHeadTail
                                                                                   : SequenceSplit::kContiguous)),
      rotation_(options.rotation),
      sequence_length_(sequence_length) {}

// Attention over other tokens than the scope speaks of would be wrong without anybody noticing.
void ActiveScheme::check_length(const char* name, const at::Tensor& tensor) const {
  if (!sequence_length_) return;
  const auto expected = num_local_tokens(*sequence_length_, mesh_.get_local_rank(), mesh_.size(), split_);
  TORCH_CHECK_VALUE(tensor.size(2) == expected, "scaled_dot_product_attention inside context_parallel: ", name, " has ",
                    tensor.size(2), " tokens, but this rank holds ", expected, " of the sequence of ",
                    *sequence_length_, ". Hint: give context_parallel every input whose tokens the model reads");
}

at::Tensor ActiveScheme::attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double dropout_p,
                                bool is_causal, std::optional<double> scale, bool enable_gqa) {
  check_length("query", q);
  check_length("key", k);
  was_used_ = true;
  if (method_ == ContextParallelMethod::kUlysses)
    return ulysses_attention(q, k, v, mesh_,
                             {.is_causal = is_causal,
                              .scale = scale,
                              .enable_gqa = enable_gqa,
                              .dropout_p = dropout_p,
                              .split = split_,
                              .sequence_length = sequence_length_});
  TORCH_CHECK_NOT_IMPLEMENTED(dropout_p == 0, "dropout of attention (dropout_p ", dropout_p,
                              ") inside context_parallel by ring: set it to 0, or use the method kUlysses");
  return ring_attention(q, k, v, mesh_,
                        {.is_causal = is_causal,
                         .scale = scale,
                         .enable_gqa = enable_gqa,
                         .split = split_,
                         .rotation = rotation_,
                         .sequence_length = sequence_length_});
}

Takeover::Takeover(const std::shared_ptr<ActiveScheme>& scheme)
    : info_(mesh::SequenceScope::kind(), scheme), key_((ensure_registered(), kTakeoverKey)) {}

}  // namespace fsdp::attention
