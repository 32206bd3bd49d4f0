#include <fsdp/sequence_layout.h>

#include "attention/sequence_shards.h"

namespace fsdp {
namespace {

attention::SequenceShards checked_shards(int64_t sequence_length, int64_t num_ranks, SequenceSplit split) {
  TORCH_CHECK_VALUE(sequence_length >= 1, "sequence_length is ", sequence_length, ", but a sequence has tokens");
  TORCH_CHECK_VALUE(num_ranks >= 1, "num_ranks is ", num_ranks, ", but at least one rank holds the sequence");
  return {sequence_length, num_ranks, split};
}

attention::SequenceShards checked_shards(int64_t sequence_length, int64_t rank, int64_t num_ranks,
                                         SequenceSplit split) {
  const auto shards = checked_shards(sequence_length, num_ranks, split);
  TORCH_CHECK_VALUE(rank >= 0 && rank < num_ranks, "rank is ", rank, ", but there are ranks 0 to ", num_ranks - 1);
  return shards;
}

torch::Tensor positions_of(const std::vector<attention::Extent>& chunks, int64_t offset = 0) {
  std::vector<torch::Tensor> parts;
  parts.reserve(chunks.size());
  for (const auto& chunk : chunks) parts.push_back(torch::arange(chunk.begin + offset, chunk.end + offset, at::kLong));
  return torch::cat(parts);
}

}  // namespace

int64_t num_local_tokens(int64_t sequence_length, int64_t rank, int64_t num_ranks, SequenceSplit split) {
  return checked_shards(sequence_length, rank, num_ranks, split).num_rows(rank);
}

torch::Tensor local_positions(int64_t sequence_length, int64_t rank, int64_t num_ranks, SequenceSplit split) {
  return positions_of(checked_shards(sequence_length, rank, num_ranks, split).chunks_of(rank));
}

torch::Tensor restore_index(int64_t sequence_length, int64_t num_ranks, SequenceSplit split) {
  const auto shards = checked_shards(sequence_length, num_ranks, split);
  auto index = torch::empty({sequence_length}, at::kLong);
  for (const auto& run : shards.runs()) {
    index.narrow(0, run.position, run.length).copy_(torch::arange(run.gathered, run.gathered + run.length));
  }
  return index;
}

int64_t attended_pairs(int64_t sequence_length, int64_t rank, int64_t num_ranks, SequenceSplit split) {
  int64_t num_pairs = 0;
  for (const auto& chunk : checked_shards(sequence_length, rank, num_ranks, split).chunks_of(rank)) {
    num_pairs += (chunk.begin + 1 + chunk.end) * chunk.size() / 2;  // position p attends to p + 1 keys
  }
  return num_pairs;
}

torch::Tensor document_positions(const std::vector<int64_t>& lengths, int64_t rank, int64_t num_ranks) {
  TORCH_CHECK_VALUE(!lengths.empty(), "document_positions: there are no documents");
  std::vector<torch::Tensor> parts;
  int64_t begin = 0;
  for (const auto length : lengths) {
    const auto shards = checked_shards(length, rank, num_ranks, SequenceSplit::kHeadTail);
    TORCH_CHECK_VALUE(length % (2 * num_ranks) == 0, "document_positions: a document of ", length,
                      " tokens cannot be cut into ", 2 * num_ranks, " equal chunks (2 for each of ", num_ranks,
                      " ranks): pad it");
    parts.push_back(positions_of(shards.chunks_of(rank), begin));
    begin += length;
  }
  return torch::cat(parts);
}

}  // namespace fsdp
