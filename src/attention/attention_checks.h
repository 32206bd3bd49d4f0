#pragma once
// What both kinds of attention refuse before any collective, and what they learn on the way.
#include <fsdp/device_mesh.h>

#include <optional>
#include <string>

#include "attention/sequence_shards.h"

namespace fsdp::attention {

// The options that both have.
struct AttentionSettings {
  const char* function;  // as users write it, for messages
  bool is_causal;
  std::optional<double> scale;
  bool enable_gqa;
  SequenceSplit split;
  std::optional<int64_t> sequence_length;
};

// The sequence of the keys and the ranks that hold it.
struct SequenceGroup {
  ProcessGroup group;
  int64_t rank = 0;
  SequenceShards shards;
  [[nodiscard]] int64_t num_ranks() const { return shards.num_ranks; }
};

struct AttentionInputs {
  at::Tensor q, k, v;
  [[nodiscard]] int64_t num_queries() const { return q.size(2); }
  [[nodiscard]] int64_t num_keys() const { return k.size(2); }
};

// `function`: as users write it. Errors: c10::ValueError for all but a 1-D mesh.
void check_sequence_mesh(const DeviceMesh& mesh, const char* function);

// `seq_dim`, from 0 on. `title`: for messages. Errors: c10::IndexError when `tensor` has no such dim.
[[nodiscard]] int64_t checked_seq_dim(const std::string& title, const at::Tensor& tensor, int64_t seq_dim);

[[nodiscard]] SequenceGroup checked_sequence_group(const AttentionInputs& inputs, const DeviceMesh& mesh,
                                                   const AttentionSettings& settings);

// Meets the other ranks when inputs or settings are of another kind than in the call before on this group. `details`:
// what else must agree.
void agree_on_call(const AttentionInputs& inputs, const SequenceGroup& sequence, const AttentionSettings& settings,
                   const std::string& details);

// As autocast treats scaled_dot_product_attention; here so that the exchanged bytes are those of the low precision.
[[nodiscard]] AttentionInputs autocast_inputs(const AttentionInputs& inputs);

}  // namespace fsdp::attention
