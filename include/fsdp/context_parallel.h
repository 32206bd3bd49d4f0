#pragma once
// Trains on sequences too long for one rank: within the scope every rank holds some of the tokens, and
// scaled_dot_product_attention sees all of them.
//
//   auto mesh = fsdp::init_device_mesh(torch::kCPU, {2, 2}, {"dp", "cp"});
//   fsdp::fully_shard(*model, {.mesh = mesh, .dp_mesh_dims = {.shard = {"dp", "cp"}}});
//   auto labels = fsdp::next_token_labels(tokens);                                  // before the split
//   {
//     auto scope = fsdp::context_parallel(*model, mesh["cp"], {tokens, labels}, {1, 1});
//     auto logits = model->forward(tokens, scope.position_ids());                   // [B, S / cp, V]
//     auto loss = fsdp::mean_over_ranks(cross_entropy_sum(logits, labels), num_valid(labels), mesh);
//     loss.backward();                                                              // inside the scope
//   }                                                                  // tokens and labels are whole again
//
// PyTorch: torch.distributed.tensor.experimental.context_parallel, context_parallel_unshard. docs/context_parallel.md.
#include <fsdp/device_mesh.h>
#include <fsdp/module_pointer.h>
#include <fsdp/ring_attention.h>
#include <fsdp/sequence_layout.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <vector>

namespace fsdp {

enum class ContextParallelMethod {
  kUlysses,  // heads are dealt to the ranks: two all-to-alls; at most as many ranks as query heads
  kRing,     // keys and values travel: any number of heads
};

struct ContextParallelOptions {
  ContextParallelMethod method = ContextParallelMethod::kUlysses;
  // Unset: kHeadTail for kRing, which balances causal work, and kContiguous for kUlysses, which is balanced anyway.
  std::optional<SequenceSplit> split = std::nullopt;
  RingRotation rotation = RingRotation::kAllGather;  // of kRing
  std::vector<at::Tensor> no_restore_buffers = {};   // of the buffers: stay this rank's part when the scope ends
  // The length of the whole sequence where no buffer tells it. Unset, and no buffer: equal parts on all ranks.
  std::optional<int64_t> sequence_length = std::nullopt;
  // Parameters whose gradients this library does not average over the mesh are an error, as their ranks would train
  // apart; true when the program averages them itself (DDP over these ranks, an all-reduce by hand).
  bool gradients_reduced_elsewhere = false;
};

// The scope. It belongs to the thread that made it, and scopes end in the reverse of the order in which they began.
class [[nodiscard]] ContextParallel {
 public:
  struct State;
  explicit ContextParallel(std::unique_ptr<State> state);
  ~ContextParallel();  // restores the buffers and plain attention, also after an exception
  ContextParallel(ContextParallel&&) noexcept;
  ContextParallel& operator=(ContextParallel&&) = delete;
  ContextParallel(const ContextParallel&) = delete;
  ContextParallel& operator=(const ContextParallel&) = delete;

  // Of the whole sequence. Errors: c10::ValueError when neither buffers nor options told it.
  [[nodiscard]] int64_t sequence_length() const;
  // The place in the whole sequence of each token of this rank: int64 [S_local], on the mesh's device. For rotary and
  // learnt position embeddings. Errors: as above.
  [[nodiscard]] at::Tensor position_ids() const;
  // The whole of a tensor that is split along `seq_dim` in this scope, on every rank; without graph. Collective.
  [[nodiscard]] at::Tensor unshard(const at::Tensor& local, int64_t seq_dim) const;

 private:
  std::unique_ptr<State> state_;
};

// Until the returned scope ends: each of `buffers` (tensors that hold all tokens on each rank of `mesh`: inputs,
// labels, masks of padding, rotary tables) holds this rank's part along its entry of `seq_dims`, in place, and every
// scaled_dot_product_attention on this thread, also inside backward and recomputation, is that of the whole sequence.
// `mesh`: 1-D, the ranks that share a sequence; with one rank attention stays LibTorch's own, and nothing is refused
// for its sake. Backward runs inside the scope; outside of it, autograd complains where the graph saved a buffer, as
// that changed. Buffers of a module that are split keep their parts under DistributedDataParallel, and cannot be saved
// or loaded until the scope ends. In-place changes of a buffer inside the scope are lost with its part. Errors:
// c10::ValueError for a mesh of several dims, unequal numbers of buffers and dims, buffers of unequal lengths, shorter
// than the mesh, sharded or requiring grad; a module that holds a torch::nn::MultiheadAttention or Transformer, which
// do not call scaled_dot_product_attention (by path); a plain parameter that requires grad (by path). Inside the scope:
// attention with a mask, of another length than this rank's part, or of parameters whose gradient is not averaged over
// `mesh`. c10::NotImplementedError within another scope. Where there are buffers the call is collective, a meeting in
// the store: c10::ValueError on every rank when they differ between the ranks.
ContextParallel context_parallel(torch::nn::Module& module, const DeviceMesh& mesh,
                                 const std::vector<at::Tensor>& buffers, const std::vector<int64_t>& seq_dims,
                                 const ContextParallelOptions& options = {});
template <detail::ModulePointer P>
ContextParallel context_parallel(const P& module, const DeviceMesh& mesh, const std::vector<at::Tensor>& buffers,
                                 const std::vector<int64_t>& seq_dims, const ContextParallelOptions& options = {}) {
  return context_parallel(detail::module_of(module, "context_parallel"), mesh, buffers, seq_dims, options);
}

// This rank's part of `whole` along `seq_dim`, a copy. Position ids [3, B, S] are cut on dim 2. No communication.
// Errors: c10::ValueError for a mesh of several dims or a sequence shorter than it; c10::IndexError for the dim.
[[nodiscard]] at::Tensor context_parallel_shard(const at::Tensor& whole, const DeviceMesh& mesh, int64_t seq_dim,
                                                SequenceSplit split = SequenceSplit::kContiguous);

// The whole of a tensor of which each rank of `mesh` holds its part along `seq_dim`; the inverse of the above, on every
// rank, without graph. `sequence_length`: of the whole; unset: equal parts. Collective. Errors: as above; on every
// rank, c10::ValueError when a part has another length than its rank must have.
[[nodiscard]] at::Tensor context_parallel_unshard(const at::Tensor& local, const DeviceMesh& mesh, int64_t seq_dim,
                                                  SequenceSplit split = SequenceSplit::kContiguous,
                                                  std::optional<int64_t> sequence_length = std::nullopt);

// What follows each token: tokens moved by one along `seq_dim`, `ignore_index` in the last place. Made before the
// sequence is split: a rank does not hold what follows its last token.
[[nodiscard]] at::Tensor next_token_labels(const at::Tensor& tokens, int64_t seq_dim = -1, int64_t ignore_index = -100);

}  // namespace fsdp
