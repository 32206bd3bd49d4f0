#pragma once
// Attention over a sequence that is spread over ranks: queries stay, keys and values come around.
//
//   auto mesh = fsdp::init_device_mesh(torch::kCPU, {fsdp::world_size()}, {"cp"});
//   auto y = fsdp::ring_attention(q, k, v, mesh, {.is_causal = true, .split = fsdp::SequenceSplit::kHeadTail});
//
// Every rank attends from its own tokens to one rank's keys after the other and merges the results by their
// log-sum-exp, so nothing of size [S, S] exists anywhere. Any number of heads. With causality, kHeadTail gives all
// ranks the same work. PyTorch: torch.distributed.tensor.experimental.context_parallel.
#include <fsdp/device_mesh.h>
#include <fsdp/sequence_layout.h>

#include <optional>

namespace fsdp {

// How keys and values reach every rank: all at once by one all-gather (fewer collectives; memory for the keys and
// values of the whole sequence), or from neighbour to neighbour by an all-to-all a step (memory for two ranks' parts).
// PyTorch: set_rotate_method, a global setting there.
enum class RingRotation { kAllGather, kAllToAll };

struct RingOptions {
  bool is_causal = false;
  std::optional<double> scale = std::nullopt;        // 1 / sqrt(head_dim)
  bool enable_gqa = false;                           // k and v may have fewer heads than q
  SequenceSplit split = SequenceSplit::kContiguous;  // how the rows were dealt; kHeadTail with is_causal only
  RingRotation rotation = RingRotation::kAllGather;
  // Tokens (of k and v) on all ranks together; S_local * ranks when not given. Give it where S does not divide.
  std::optional<int64_t> sequence_length = std::nullopt;
};

// q [B, H, S_local, D], k and v [B, H_kv, S_local, D] -> [B, H, S_local, D]: this rank's rows of
// scaled_dot_product_attention over the whole sequence. Rows are those of local_positions(S, rank, ranks, split). Exact
// for every S. Partial results and gradients are added in float, or double for double inputs. Without causality q may
// hold any number of tokens. `mesh` is 1-D; no dropout.
//
// Collectives with W ranks: kAllGather 1 forward, 1 all-gather and W all-to-alls backward; kAllToAll W - 1 forward,
// 2 W - 1 backward; none for W = 1. Every rank calls it, and runs its backward. A call with other shapes or options
// than the one before it on `mesh` also meets the others in the store.
//
// Errors, before any collective: c10::ValueError for shapes, dtypes, devices or a mesh that do not fit, and for
// kHeadTail without causality; c10::NotImplementedError for causal attention with different lengths of q and k, or a
// device without a kernel here (all but the CPU); c10::TypeError for DTensors. c10::DistError when another rank does
// not come or wants something else. Its backward refuses create_graph with c10::NotImplementedError.
[[nodiscard]] torch::Tensor ring_attention(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v,
                                           const DeviceMesh& mesh, const RingOptions& options = {});

}  // namespace fsdp
