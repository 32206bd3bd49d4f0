// Cutting tensors along the sequence and putting them together again.
#include <fsdp/context_parallel.h>

#include "attention/attention_checks.h"
#include "comm/collectives.h"
#include "mesh/agreement.h"

namespace fsdp {

namespace {

int64_t checked_dim(const char* function, const at::Tensor& tensor, int64_t seq_dim) {
  const auto ndim = tensor.dim();
  TORCH_CHECK_INDEX(seq_dim >= -ndim && seq_dim < ndim, function, ": seq_dim ", seq_dim, " of a tensor of ", ndim,
                    " dims");
  return seq_dim < 0 ? seq_dim + ndim : seq_dim;
}

}  // namespace

at::Tensor context_parallel_shard(const at::Tensor& whole, const DeviceMesh& mesh, int64_t seq_dim,
                                  SequenceSplit split) {
  attention::check_sequence_mesh(mesh, "context_parallel_shard");
  const auto dim = checked_dim("context_parallel_shard", whole, seq_dim);
  TORCH_CHECK_VALUE(whole.size(dim) >= mesh.size(), "context_parallel_shard: dim ", dim, " of a tensor of shape ",
                    whole.sizes(), " is shorter than the ", mesh.size(), " ranks that would share it");
  const auto positions = local_positions(whole.size(dim), mesh.get_local_rank(), mesh.size(), split);
  return whole.index_select(dim, positions.to(whole.device()));
}

at::Tensor context_parallel_unshard(const at::Tensor& local, const DeviceMesh& mesh, int64_t seq_dim,
                                    SequenceSplit split, std::optional<int64_t> sequence_length) {
  attention::check_sequence_mesh(mesh, "context_parallel_unshard");
  const at::NoGradGuard no_grad;
  const auto dim = checked_dim("context_parallel_unshard", local, seq_dim);
  const auto num_ranks = mesh.size();
  const auto length = sequence_length.value_or(local.size(dim) * num_ranks);
  const attention::SequenceShards shards{length, num_ranks, split};
  const auto own = shards.num_rows(mesh.get_local_rank());
  auto sizes = local.sizes().vec();
  sizes[static_cast<size_t>(dim)] = -1;
  const auto wanted = c10::str(own == local.size(dim) ? "" : "another length than its rank must hold", "; of shape ",
                               at::IntArrayRef(sizes), " ", local.scalar_type(), " of ", length, " tokens");
  const auto first = text_of_first_rank(mesh, "context_parallel_unshard", wanted);
  const auto complaint =
      any_complaint(mesh, "parts to put together",
                    own != local.size(dim) ? c10::str("a part of shape ", local.sizes(), " has ", local.size(dim),
                                                      " tokens, not the ", own, " of its rank")
                    : first != wanted      ? "the ranks hold parts of different shapes or dtypes"
                                           : std::string());
  TORCH_CHECK_VALUE(complaint.empty(), "context_parallel_unshard of ", length, " tokens over ", num_ranks,
                    " ranks: ", complaint);

  const auto longest = shards.max_rows();
  auto row = local.detach().movedim(dim, 0).contiguous();  // [S_local, ...]
  auto row_sizes = row.sizes().vec();
  row_sizes.front() = longest;
  const auto padded = row.new_zeros(row_sizes);
  padded.narrow(0, 0, own).copy_(row);
  row_sizes.front() = longest * num_ranks;
  const auto gathered = row.new_empty(row_sizes);
  comm::all_gather(gathered.view({-1}), padded.view({-1}), mesh.get_group(), "parts of a sequence").wait();
  std::vector<at::Tensor> parts;
  for (int64_t r = 0; r < num_ranks; ++r) parts.push_back(gathered.narrow(0, r * longest, shards.num_rows(r)));
  const auto order = restore_index(length, num_ranks, split).to(local.device());
  return at::cat(parts).index_select(0, order).movedim(0, dim).contiguous();
}

at::Tensor next_token_labels(const at::Tensor& tokens, int64_t seq_dim, int64_t ignore_index) {
  const auto dim = checked_dim("next_token_labels", tokens, seq_dim);
  const auto length = tokens.size(dim);
  TORCH_CHECK_VALUE(length > 0, "next_token_labels: dim ", dim, " of a tensor of shape ", tokens.sizes(), " is empty");
  auto labels = at::full_like(tokens, ignore_index, at::kLong);
  labels.narrow(dim, 0, length - 1).copy_(tokens.narrow(dim, 1, length - 1));
  return labels;
}

}  // namespace fsdp
