#include "train/world.h"

#include <ATen/ops/tensor.h>

#include <cstdlib>

#include "comm/collectives.h"
#include "comm/group_state.h"

namespace fsdp::train {
namespace {

void all_reduce_now(at::Tensor& values, const DeviceMesh& mesh, c10d::ReduceOp::RedOpType op) {
  for (auto& pending : comm::all_reduce({values}, mesh.get_group(), "numbers of the training loop", op)) {
    pending.wait();
  }
}

// The `num_ranks` neighbours of `mesh` to which this rank belongs.
DeviceMesh team_of(const DeviceMesh& mesh, int64_t num_ranks) {
  const auto first = mesh.get_local_rank() / num_ranks * num_ranks;
  return DeviceMesh::from_group({comm::neighbours_of(mesh.get_group(), static_cast<int>(num_ranks))},
                                mesh.device_type(), mesh.mesh().narrow(0, first, num_ranks), {"cp"});
}

}  // namespace

World World::over(const DeviceMesh& mesh, const SequenceTeams& teams) {
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
  if (is_alone()) {
    return values;
  }
  auto tensor = at::tensor(values, at::kDouble);
  all_reduce_now(tensor, mesh_, c10d::ReduceOp::SUM);
  const auto* data = tensor.const_data_ptr<double>();
  return {data, data + tensor.numel()};
}

std::vector<double> World::mean(const std::vector<double>& values) const {
  auto result = sum(values);
  for (auto& value : result) {
    value /= static_cast<double>(size_);
  }
  return result;
}

bool World::agrees(int64_t value) const {
  if (is_alone()) {
    return true;
  }
  // Equal exactly when the largest and the smallest are; ~ reverses the order without overflow.
  auto extremes = at::tensor({value, ~value}, at::kLong);
  all_reduce_now(extremes, mesh_, c10d::ReduceOp::MAX);
  const auto* data = extremes.const_data_ptr<int64_t>();
  return data[0] == ~data[1];
}

}  // namespace fsdp::train
