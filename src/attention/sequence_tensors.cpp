// Cutting tensors along the sequence and putting them together again.
#include <fsdp/context_parallel.h>

#include "attention/attention_checks.h"
#include "comm/collectives.h"
#include "comm/group_state.h"
#include "comm/meeting.h"
#include "dtensor/gather.h"

namespace fsdp {

namespace {

// Each rank holds the part that is its own, and all hold parts of one tensor. Collective.
void check_parts(const at::Tensor& local, int64_t dim, const attention::SequenceShards& shards,
                 const DeviceMesh& mesh) {
  auto sizes = local.sizes().vec();
  sizes[static_cast<size_t>(dim)] = -1;
  const auto own = shards.num_rows(mesh.get_local_rank());
  const auto part =
      c10::str("a part of shape ", at::IntArrayRef(sizes), " ", local.scalar_type(), " of ", shards.length, " tokens");
  const auto fault = own == local.size(dim) ? std::string()
                                            : c10::str("a part of shape ", local.sizes(), " with ", local.size(dim),
                                                       " tokens, not the ", own, " of its rank");
  const auto record = fault.empty() ? part : fault;
  const auto complaint = comm::meeting_of(mesh.get_group())
                             ->compare_with_rank0("context_parallel_unshard", record, [&](const std::string& first) {
                               if (!fault.empty() || first == part) return fault;
                               return c10::str("rank 0 has ", first, ", another one ", part);
                             });
  TORCH_CHECK_VALUE(complaint.empty() && fault.empty(), "context_parallel_unshard of ", shards.length, " tokens over ",
                    shards.num_ranks, " ranks: ", complaint.empty() ? fault : complaint);
}

}  // namespace

at::Tensor context_parallel_shard(const at::Tensor& whole, const DeviceMesh& mesh, int64_t seq_dim,
                                  SequenceSplit split) {
  attention::check_sequence_mesh(mesh, "context_parallel_shard");
  const auto dim = attention::checked_seq_dim("context_parallel_shard", whole, seq_dim);
  TORCH_CHECK_VALUE(whole.size(dim) >= mesh.size(), "context_parallel_shard: dim ", dim, " of a tensor of shape ",
                    whole.sizes(), " is shorter than the ", mesh.size(), " ranks that would share it");
  const auto positions = local_positions(whole.size(dim), mesh.get_local_rank(), mesh.size(), split);
  return whole.index_select(dim, positions.to(whole.device()));
}

at::Tensor context_parallel_unshard(const at::Tensor& local, const DeviceMesh& mesh, int64_t seq_dim,
                                    SequenceSplit split, std::optional<int64_t> sequence_length) {
  attention::check_sequence_mesh(mesh, "context_parallel_unshard");
  const at::NoGradGuard no_grad;
  const auto dim = attention::checked_seq_dim("context_parallel_unshard", local, seq_dim);
  const auto num_ranks = mesh.size();
  const auto length = sequence_length.value_or(local.size(dim) * num_ranks);
  const attention::SequenceShards shards{length, num_ranks, split};
  check_parts(local, dim, shards, mesh);

  const auto longest = shards.max_rows();
  const auto rows = dtensor::padded_rows(local.detach().movedim(dim, 0), longest);  // [longest, ...]
  const auto gathered = dtensor::empty_rows(rows, num_ranks);
  comm::all_gather(gathered, rows, mesh.get_group(), "parts of a sequence").wait();
  std::vector<at::Tensor> parts;
  for (int64_t r = 0; r < num_ranks; ++r) parts.push_back(gathered.narrow(0, r * longest, shards.num_rows(r)));
  const auto order = restore_index(length, num_ranks, split).to(local.device());
  return at::cat(parts).index_select(0, order).movedim(0, dim).contiguous();
}

at::Tensor next_token_labels(const at::Tensor& tokens, int64_t seq_dim, int64_t ignore_index) {
  const auto dim = attention::checked_seq_dim("next_token_labels", tokens, seq_dim);
  const auto length = tokens.size(dim);
  TORCH_CHECK_VALUE(length > 0, "next_token_labels: dim ", dim, " of a tensor of shape ", tokens.sizes(), " is empty");
  auto labels = at::full_like(tokens, ignore_index, at::kLong);
  labels.narrow(dim, 0, length - 1).copy_(tokens.narrow(dim, 1, length - 1));
  return labels;
}

}  // namespace fsdp
