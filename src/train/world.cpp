#include "train/world.h"

#include <cstdlib>

#include "comm/group_state.h"
#include "mesh/agreement.h"
#include "mesh/reduce_numbers.h"

namespace fsdp::train {
namespace {

// The `num_ranks` neighbours of `mesh` to which this rank belongs.
DeviceMesh team_of(const DeviceMesh& mesh, int64_t num_ranks) {
  const auto first = mesh.get_local_rank() / num_ranks * num_ranks;
  return DeviceMesh::from_group({comm::neighbours_of(mesh.get_group(), static_cast<int>(num_ranks))},
                                mesh.device_type(), mesh.mesh().narrow(0, first, num_ranks), {"cp"});
}

}  // namespace

World World::over(const DeviceMesh& mesh, const SequenceTeams& teams) {
  const auto difference =
      difference_between_ranks(mesh, "teams",
                               c10::str("context_parallel_degree ", teams.degree, "\ncontext_parallel_method ",
                                        teams.method == ContextParallelMethod::kRing ? "ring" : "ulysses"));
  TORCH_CHECK_VALUE(difference.empty(), "the ranks were given different options: ", difference);
  World world;
  world.rank_ = mesh.get_local_rank();
  world.size_ = mesh.size();
  world.mesh_ = mesh;
  world.teams_ = teams;
  if (teams.degree > 1) world.context_mesh_ = team_of(mesh, teams.degree);
  return world;
}

World World::join(const SequenceTeams& teams) {
  init_process_group();
  return over(init_device_mesh(at::kCPU, {world_size()}, {"world"}), teams);
}

World World::from_environment(const SequenceTeams& teams) {
  const bool launched = std::getenv("RANK") != nullptr || std::getenv("WORLD_SIZE") != nullptr;
  return launched ? join(teams) : alone();
}

int64_t World::announced_size() {
  const char* text = std::getenv("WORLD_SIZE");
  return text == nullptr ? 1 : std::atoll(text);
}

std::optional<ContextParallel> World::split_sequences(torch::nn::Module& module, const Batch& batch) const {
  if (!context_mesh_.defined()) return std::nullopt;
  return context_parallel(module, context_mesh_, {batch.inputs, batch.targets}, {1, 1}, {.method = teams_.method});
}

std::vector<double> World::sum(const std::vector<double>& values) const {
  if (is_alone()) return values;
  return reduce_numbers_at_once(values, mesh_, "numbers of the training loop", c10d::ReduceOp::SUM);
}

std::vector<double> World::mean(const std::vector<double>& values) const {
  auto result = sum(values);
  for (auto& value : result) {
    value /= static_cast<double>(size_);
  }
  return result;
}

std::string World::any_difference(const std::string& text) const {
  return is_alone() ? "" : difference_between_ranks(mesh_, "text and options of the training", text);
}

}  // namespace fsdp::train
