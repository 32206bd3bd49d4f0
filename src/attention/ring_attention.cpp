#include <fsdp/ring_attention.h>
#include <torch/csrc/autograd/custom_function.h>

#include "attention/attention_kernels.h"
#include "attention/ring_exchange.h"

namespace fsdp {
namespace {

using attention::KeyValueBlock;
using attention::PartialAttention;
using attention::RingBlock;
using attention::RingCall;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kRing = "ring_attention";

// Puts the attention to some keys (`part`) and that to all keys so far (`rows`) together, in place.
void merge_attention(const PartialAttention& rows, const PartialAttention& part) {
  const auto weight = at::sigmoid(part.lse - rows.lse).unsqueeze(-1);  // of part
  rows.out.lerp_(part.out.to(rows.out.scalar_type()), weight);
  auto lse = rows.lse;
  at::logaddexp_out(lse, rows.lse, part.lse);
}

PartialAttention rows_of(const PartialAttention& whole, const RingBlock& block) {
  return {whole.out.narrow(2, block.query_begin, block.num_queries),
          whole.lse.narrow(2, block.query_begin, block.num_queries)};
}

KeyValueBlock first_keys(const KeyValueBlock& keys, int64_t num_keys) {
  return {keys.k.narrow(2, 0, num_keys), keys.v.narrow(2, 0, num_keys)};
}

PartialAttention ring_forward(const RingCall& call, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const auto dtype = attention::accumulation_dtype(q.scalar_type());
  attention::KeyValueRing ring(call, k, v);
  PartialAttention whole;
  for (int64_t step = 0; step < call.num_steps(); ++step) {
    const auto keys = step == 0 ? KeyValueBlock{k, v} : ring.take(step);
    const auto block = block_of_step(call, step, q.size(2));
    if (block.is_empty()) continue;
    const auto [part_k, part_v] = first_keys(keys, block.num_keys);
    const auto part = attention::attention_with_lse(q.narrow(2, block.query_begin, block.num_queries), part_k, part_v,
                                                    block.is_causal, call.scale);
    if (whole.out.defined()) {
      merge_attention(rows_of(whole, block), part);
    } else {  // the first block that is not empty has all queries
      whole = {part.out.to(dtype), part.lse};
    }
  }
  if (!whole.out.defined()) whole = {at::empty_like(q), at::empty(q.sizes().slice(0, 3), q.options().dtype(dtype))};
  return {whole.out.to(q.scalar_type()), whole.lse};
}

variable_list ring_backward(const RingCall& call, const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const PartialAttention& whole) {
  attention::KeyValueRing ring(call, k, v);
  attention::GradientRing gradients(call, k);
  at::Tensor grad_q;
  for (int64_t step = 0; step < call.num_steps(); ++step) {
    const auto keys = step == 0 ? KeyValueBlock{k, v} : ring.take(step);
    const auto block = block_of_step(call, step, q.size(2));
    if (block.is_empty()) {
      gradients.add(step, {});
      continue;
    }
    const auto rows = [&](const at::Tensor& tensor) { return tensor.narrow(2, block.query_begin, block.num_queries); };
    const auto [part_k, part_v] = first_keys(keys, block.num_keys);
    const auto [part_grad_q, part_grad_k, part_grad_v] = attention::attention_with_lse_backward(
        rows(grad_out), rows(q), part_k, part_v, rows_of(whole, block), block.is_causal, call.scale);
    gradients.add(step, {part_grad_k, part_grad_v});
    if (grad_q.defined()) {
      rows(grad_q).add_(part_grad_q);
    } else {
      grad_q = part_grad_q.to(attention::accumulation_dtype(q.scalar_type()));
    }
  }
  if (!grad_q.defined()) grad_q = at::zeros_like(q);
  const auto [grad_k, grad_v] = gradients.take();
  const auto dtype = q.scalar_type();
  return {grad_q.to(dtype), grad_k.to(dtype), grad_v.to(dtype)};
}

struct RingAttentionFunction : torch::autograd::Function<RingAttentionFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const c10::intrusive_ptr<RingCall>& call) {
    const auto whole = ring_forward(*call, q, k, v);
    context->saved_data["call"] = at::IValue::make_capsule(call);
    context->save_for_backward({q, k, v, whole.out, whole.lse});
    return whole.out;
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(), "create_graph through ", kRing,
                                " is not supported: its kernels have no second derivative");
    const auto call = c10::static_intrusive_pointer_cast<RingCall>(context->saved_data["call"].toCapsule());
    const auto saved = context->get_saved_variables();
    auto result = ring_backward(*call, grads[0], saved[0], saved[1], saved[2], {saved[3], saved[4]});
    result.emplace_back();  // for the call
    return result;
  }
};

}  // namespace

torch::Tensor ring_attention(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v,
                             const DeviceMesh& mesh, const RingOptions& options) {
  const attention::AttentionSettings settings{kRing,         options.is_causal,      options.scale, options.enable_gqa,
                                              options.split, options.sequence_length};
  TORCH_CHECK_VALUE(options.is_causal || options.split == SequenceSplit::kContiguous, kRing,
                    ": head-tail balances causal attention, but is_causal is false: deal the tokens by kContiguous");
  auto call = c10::make_intrusive<RingCall>();
  const auto inputs = attention::autocast_inputs({q, k, v});
  call->sequence = checked_sequence_group(inputs, mesh, settings);
  call->is_causal = options.is_causal;
  call->scale = options.scale;
  call->rotation = options.rotation;
  attention::check_attention_with_lse(q, kRing);
  const bool gathers = options.rotation == RingRotation::kAllGather;
  agree_on_call(inputs, call->sequence, settings, gathers ? ", rotated by all-gather" : ", rotated by all-to-all");
  return RingAttentionFunction::apply(inputs.q, inputs.k, inputs.v, call);
}

}  // namespace fsdp
