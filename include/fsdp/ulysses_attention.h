#pragma once
// Attention over a sequence that is spread over ranks, computed by heads: all-to-all from tokens to heads, attention
// over the whole sequence for the own heads, all-to-all back.
//
//   auto mesh = fsdp::init_device_mesh(torch::kCPU, {fsdp::world_size()}, {"cp"});
//   auto y = fsdp::ulysses_attention(q, k, v, mesh, {.is_causal = true});   // q, k, v: this rank's tokens
//
// Cheapest in communication (two all-to-alls forward, two backward) and open to every attention kernel, but num_heads
// must divide by the ranks; ring_attention has no such limit. PyTorch 2.13: has no counterpart.
#include <fsdp/device_mesh.h>
#include <fsdp/sequence_layout.h>

#include <optional>

namespace fsdp {

struct UlyssesOptions {
  bool is_causal = false;
  std::optional<double> scale = std::nullopt;  // 1 / sqrt(head_dim)
  bool enable_gqa = false;                     // k and v may have fewer heads than q
  // Drawn from each rank's generator: seed the ranks differently. Materialises [S, S] for the own heads.
  double dropout_p = 0;
  SequenceSplit split = SequenceSplit::kContiguous;  // how the rows were dealt
  // Tokens on all ranks together; S_local * ranks when not given. Give it where S does not divide.
  std::optional<int64_t> sequence_length = std::nullopt;
  // Tokens of q on all ranks together, dealt as those of k. When not given: q has the tokens of k where both hold
  // equally many here, else S_q_local * ranks. Without causality only may it differ from sequence_length.
  std::optional<int64_t> query_length = std::nullopt;
};

// q [B, H, S_local, D], k and v [B, H_kv, S_local, D] -> [B, H, S_local, D]: this rank's rows of
// scaled_dot_product_attention over the whole sequence. Rows are those of local_positions(S, rank, ranks, split).
// Exact for every S and split. Without causality q may have another length than k and v: see query_length. `mesh` is
// 1-D. Differentiable; a second derivative needs a kernel that has one.
//
// Rank r computes query heads [r H/W, (r+1) H/W). When H_kv divides by the W ranks, each has H_kv / W of the KV heads;
// when W divides by H_kv, each has a copy of the one it needs, and their gradients are summed.
//
// Collective: every rank calls it. A call with other shapes or options than the one before it on `mesh` also meets the
// others in the store.
// Errors, before any collective: c10::ValueError for shapes, dtypes, devices, heads or a mesh that do not fit;
// c10::NotImplementedError for causal attention with different lengths of q and k; c10::TypeError for DTensors.
// c10::DistError when another rank does not come or wants something else.
[[nodiscard]] torch::Tensor ulysses_attention(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v,
                                              const DeviceMesh& mesh, const UlyssesOptions& options = {});

}  // namespace fsdp
