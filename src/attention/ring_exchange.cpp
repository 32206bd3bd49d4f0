#include "attention/ring_exchange.h"

#include <ATen/ATen.h>

#include "attention/attention_kernels.h"

namespace fsdp::attention {
namespace {

KeyValueShape shape_of(const at::Tensor& k) { return {k.size(0), k.size(1), k.size(3)}; }

// To the next rank, from the previous one.
comm::PendingCollective start_ring_shift(const RingCall& call, const at::Tensor& received, const at::Tensor& sent,
                                         const char* what) {
  const auto& [group, rank, shards] = call.sequence;
  std::vector<int64_t> received_counts(shards.num_ranks, 0), sent_counts(shards.num_ranks, 0);
  received_counts[call.source_of(1)] = received.numel();
  sent_counts[(rank + 1) % shards.num_ranks] = sent.numel();
  return comm::all_to_all(received, received_counts, sent, sent_counts, group, what);
}

}  // namespace

KeyValueBlock KeyValueShape::block(const at::Tensor& flat, int64_t num_rows) const {
  const auto both = flat.narrow(0, 0, numel(num_rows)).view({2, batch, num_rows, heads, head_dim}).transpose(2, 3);
  return {both.select(0, 0), both.select(0, 1)};
}

KeyValueRing::KeyValueRing(const RingCall& call, const at::Tensor& k, const at::Tensor& v)
    : call_(call), shape_(shape_of(k)) {
  if (call.num_steps() == 1) return;
  const bool gathers = call.rotation == RingRotation::kAllGather;
  const auto num_rows = k.size(2);
  auto own = at::empty({shape_.numel(gathers ? call.sequence.shards.max_rows() : num_rows)}, k.options());
  const auto block = shape_.block(own, num_rows);
  block.k.copy_(k);
  block.v.copy_(v);
  if (gathers) {
    start_gather(own);
  } else {
    start_shift(own, 1);
  }
}

void KeyValueRing::start_gather(const at::Tensor& own) {
  sent_ = own;
  received_ = at::empty({call_.num_steps() * own.numel()}, own.options());
  // As bytes: gloo knows few dtypes.
  pending_ = comm::all_gather(received_.view(at::kByte), sent_.view(at::kByte), call_.sequence.group,
                              "keys and values of ring_attention");
}

void KeyValueRing::start_shift(at::Tensor sent, int64_t step) {
  sent_ = std::move(sent);
  const auto num_rows = call_.sequence.shards.num_rows(call_.source_of(step));
  received_ = at::empty({shape_.numel(num_rows)}, sent_.options());
  pending_ = start_ring_shift(call_, received_, sent_, "keys and values of ring_attention");
}

KeyValueBlock KeyValueRing::take(int64_t step) {
  pending_.wait();
  const auto source = call_.source_of(step);
  const auto num_rows = call_.sequence.shards.num_rows(source);
  if (call_.rotation == RingRotation::kAllGather) {
    const auto slot = received_.numel() / call_.num_steps();
    return shape_.block(received_.narrow(0, source * slot, slot), num_rows);
  }
  const auto block = shape_.block(received_, num_rows);
  if (step + 1 < call_.num_steps()) start_shift(received_, step + 1);
  return block;
}

GradientRing::GradientRing(const RingCall& call, const at::Tensor& k)
    : call_(call), shape_(shape_of(k)), options_(k.options().dtype(accumulation_dtype(k.scalar_type()))) {}

int64_t GradientRing::rows_of_step(int64_t step) const {
  return call_.sequence.shards.num_rows(call_.source_of(step % call_.num_steps()));
}

void GradientRing::add(int64_t step, const KeyValueBlock& part) {
  pending_.wait();
  const auto num_rows = rows_of_step(step);
  if (step == 0) {
    received_ = part.k.defined() ? at::empty({shape_.numel(num_rows)}, options_)
                                 : at::zeros({shape_.numel(num_rows)}, options_);
  }
  if (part.k.defined()) {
    const auto block = shape_.block(received_, num_rows);
    const auto num_touched = part.k.size(2);
    const auto put = [&](const at::Tensor& whole, const at::Tensor& values) {
      auto rows = whole.narrow(2, 0, num_touched);
      step == 0 ? rows.copy_(values) : rows.add_(values);  // own queries see all own keys
    };
    put(block.k, part.k);
    put(block.v, part.v);
  }
  if (call_.num_steps() == 1) return;
  sent_ = received_;
  received_ = at::empty({shape_.numel(rows_of_step(step + 1))}, options_);
  pending_ = start_ring_shift(call_, received_, sent_, "gradients of keys and values of ring_attention");
}

KeyValueBlock GradientRing::take() {
  pending_.wait();
  return shape_.block(received_, rows_of_step(0));
}

}  // namespace fsdp::attention
