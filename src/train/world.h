#pragma once
// The ranks that train together: those of the default process group, or this one process on its own. Neighbouring ranks
// may share sequences (context parallelism); then each such team of ranks sees the same rows of a batch.
#include <fsdp/context_parallel.h>
#include <fsdp/device_mesh.h>

#include <optional>
#include <string>
#include <vector>

#include "train/batches.h"

namespace fsdp::train {

// How many ranks share each sequence, and how.
struct SequenceTeams {
  int64_t degree = 1;
  ContextParallelMethod method = ContextParallelMethod::kUlysses;
};

class World {
 public:
  // One process, no process group.
  [[nodiscard]] static World alone() { return World(); }
  // The ranks of a 1-D mesh, this one at its place in it. Collective where `teams.degree`, which divides the number of
  // ranks, is more than 1.
  [[nodiscard]] static World over(const DeviceMesh& mesh, const SequenceTeams& teams = {});
  // Every rank that a launcher started, through init_process_group. Errors: as that function.
  [[nodiscard]] static World join(const SequenceTeams& teams = {});
  // alone() unless a launcher set RANK or WORLD_SIZE.
  [[nodiscard]] static World from_environment(const SequenceTeams& teams = {});
  // The size that from_environment() will have, known before any rank is met; 0 when WORLD_SIZE is no number.
  [[nodiscard]] static int64_t announced_size();

  [[nodiscard]] bool is_alone() const { return !mesh_.defined(); }
  [[nodiscard]] bool is_first() const { return rank_ == 0; }
  [[nodiscard]] int64_t rank() const { return rank_; }
  [[nodiscard]] int64_t size() const { return size_; }
  [[nodiscard]] const DeviceMesh& mesh() const { return mesh_; }  // 1-D over all ranks; undefined when alone

  // Which of the parts of a batch is this rank's, of how many; the ranks of a team have the same one.
  [[nodiscard]] int64_t data_rank() const { return rank_ / context_parallel_degree(); }
  [[nodiscard]] int64_t num_data_ranks() const { return size_ / context_parallel_degree(); }
  [[nodiscard]] int64_t context_parallel_degree() const { return teams_.degree; }
  // Until the scope ends `batch` holds this rank's tokens of each of its rows; nullopt when ranks share no sequences.
  [[nodiscard]] std::optional<ContextParallel> split_sequences(torch::nn::Module& module, const Batch& batch) const;

  // Element by element over the ranks, equal on all of them. Collective.
  [[nodiscard]] std::vector<double> sum(const std::vector<double>& values) const;
  [[nodiscard]] std::vector<double> mean(const std::vector<double>& values) const;
  // The first line in which `text` of some rank differs from that of the first one, told to all; "" when none does.
  // Collective.
  [[nodiscard]] std::string any_difference(const std::string& text) const;

 private:
  World() = default;

  DeviceMesh mesh_;
  DeviceMesh context_mesh_;  // the team; undefined when each rank has sequences of its own
  SequenceTeams teams_;
  int64_t rank_ = 0;
  int64_t size_ = 1;
};

}  // namespace fsdp::train
