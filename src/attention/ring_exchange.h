#pragma once
// What travels around the ring: keys and values to every rank, and their gradients back to the rank that owns them.
#include <ATen/core/Tensor.h>

#include "attention/ring_blocks.h"
#include "comm/collectives.h"

namespace fsdp::attention {

// Keys and values, or their gradients, of one rank: two views [B, H, S, D] into one flat buffer [2, B, S, H, D].
struct KeyValueBlock {
  at::Tensor k, v;
};

struct KeyValueShape {
  int64_t batch, heads, head_dim;
  [[nodiscard]] int64_t numel(int64_t num_rows) const { return 2 * batch * num_rows * heads * head_dim; }
  // Of the beginning of `flat`.
  [[nodiscard]] KeyValueBlock block(const at::Tensor& flat, int64_t num_rows) const;
};

// The keys and values of the other ranks, one rank after the other. What the next step needs is on its way while the
// caller computes.
class KeyValueRing {
 public:
  // Starts the first exchange.
  KeyValueRing(const RingCall& call, const at::Tensor& k, const at::Tensor& v);
  // Those of call.source_of(step); once for each step, 1 to W - 1 in order.
  [[nodiscard]] KeyValueBlock take(int64_t step);

 private:
  void start_gather(const at::Tensor& own);
  void start_shift(at::Tensor sent, int64_t step);

  const RingCall& call_;
  KeyValueShape shape_;
  at::Tensor sent_, received_;  // flat
  comm::PendingCollective pending_;
};

// Gradients of keys and values: each block goes once around, and every rank adds what its queries say. W shifts.
class GradientRing {
 public:
  GradientRing(const RingCall& call, const at::Tensor& k);
  // Adds to the gradients of call.source_of(step) and passes them on; every step, 0 to W - 1 in order. `part` covers
  // the first rows; undefined when this rank's queries saw none.
  void add(int64_t step, const KeyValueBlock& part);
  // This rank's own, of the dtype in which they were added.
  [[nodiscard]] KeyValueBlock take();

 private:
  [[nodiscard]] int64_t rows_of_step(int64_t step) const;

  const RingCall& call_;
  KeyValueShape shape_;
  at::TensorOptions options_;
  at::Tensor sent_, received_;  // flat
  comm::PendingCollective pending_;
};

}  // namespace fsdp::attention
