#include "train/world.h"

#include <ATen/ops/tensor.h>

#include <cstdlib>

#include "comm/collectives.h"

namespace fsdp::train {
namespace {

void all_reduce_now(at::Tensor& values, const DeviceMesh& mesh, c10d::ReduceOp::RedOpType op) {
  for (auto& pending : comm::all_reduce({values}, mesh.get_group(), "numbers of the training loop", op)) {
    pending.wait();
  }
}

}  // namespace

World World::over(const DeviceMesh& mesh) {
  World world;
  world.rank_ = mesh.get_local_rank();
  world.size_ = mesh.size();
  world.mesh_ = mesh;
  return world;
}

World World::join() {
  init_process_group();
  return over(init_device_mesh(at::kCPU, {world_size()}, {"dp"}));
}

World World::from_environment() {
  const bool launched = std::getenv("RANK") != nullptr || std::getenv("WORLD_SIZE") != nullptr;
  return launched ? join() : alone();
}

int64_t World::announced_size() {
  const char* text = std::getenv("WORLD_SIZE");
  return text == nullptr ? 1 : std::atoll(text);
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
