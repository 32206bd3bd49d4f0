#pragma once
// What a rank computes in each step of the ring.
#include <fsdp/ring_attention.h>
#include <torch/custom_class.h>

#include "attention/attention_checks.h"

namespace fsdp::attention {

// One call of ring_attention, shared by its forward and its backward.
struct RingCall : torch::CustomClassHolder {
  SequenceGroup sequence;
  bool is_causal = false;
  std::optional<double> scale;
  RingRotation rotation = RingRotation::kAllGather;

  [[nodiscard]] int64_t num_steps() const { return sequence.num_ranks(); }
  // Whose keys and values this rank holds in a step.
  [[nodiscard]] int64_t source_of(int64_t step) const;
};

// Own queries [query_begin, query_begin + num_queries) attend to the first num_keys keys of the step's source.
struct RingBlock {
  int64_t query_begin = 0;
  int64_t num_queries = 0;
  int64_t num_keys = 0;
  bool is_causal = false;
  [[nodiscard]] bool is_empty() const { return num_queries == 0 || num_keys == 0; }
};

// With causality a block is causal (own keys), complete, or not there. kHeadTail: towards a rank before this one all
// own queries see the head of its keys; towards one after it, the own tail sees all of them. So every step costs the
// same.
[[nodiscard]] RingBlock block_of_step(const RingCall& call, int64_t step, int64_t num_queries);

}  // namespace fsdp::attention
