// Ranks that distribute different tensors all get an error, before the backend could end their process.
#include <fsdp/dtensor.h>
#include <gtest/gtest.h>

#include <array>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "support/errors.h"
#include "support/run_ranks.h"

namespace fsdp {
namespace {

TEST(Distribute, DifferentTensorsAreAnErrorOnAllRanks) {
  testing::run_ranks(3, [](const ProcessGroup& group, int rank) {
    const auto mesh = DeviceMesh::from_group(group, torch::kCPU);
    EXPECT_ERROR(std::ignore = distribute_tensor({}, mesh, {Shard{0}}), c10::ValueError, "undefined tensor");
    EXPECT_ERROR(std::ignore = DTensor::from_local({}, mesh, {Shard{0}}), c10::ValueError, "undefined tensor");
    EXPECT_ERROR(std::ignore = distribute_tensor(torch::ones({rank == 1 ? 5 : 4}), mesh, {Shard{0}}), c10::ValueError,
                 "rank 1 has Float [5], but another rank has Float [4]");
    const auto dtype = rank == 2 ? torch::kDouble : torch::kFloat;
    EXPECT_ERROR(std::ignore = distribute_tensor(torch::ones({4}, dtype), mesh, {Shard{0}}), c10::ValueError,
                 "rank 2 has Double [4], but another rank has Float [4]");
    const auto fine = distribute_tensor(torch::full({4}, rank), mesh, {Shard{0}});  // rank 0's values
    EXPECT_EQ(fine.full_tensor().sum().item<int>(), 0);
  });
}

// The mesh dim that sees the difference tells the other.
TEST(Distribute, DifferentTensorsOnAGridAreAnErrorOnAllRanks) {
  auto rows = std::array{c10::make_intrusive<c10d::HashStore>(), c10::make_intrusive<c10d::HashStore>()};
  auto columns = std::array{c10::make_intrusive<c10d::HashStore>(), c10::make_intrusive<c10d::HashStore>()};
  for (int odd_one = 0; odd_one < 4; ++odd_one) {
    testing::run_ranks(4, [&](const ProcessGroup&, int rank) {
      const auto prefixed = [&](const auto& store) {
        return c10::make_intrusive<c10d::PrefixStore>(std::to_string(odd_one), store);
      };
      const auto column = make_process_group(prefixed(columns[rank % 2]), rank / 2, 2);
      const auto row = make_process_group(prefixed(rows[rank / 2]), rank % 2, 2);
      const auto mesh = DeviceMesh::from_group({column, row}, torch::kCPU, torch::arange(4).view({2, 2}), {"dp", "cp"});
      EXPECT_ERROR(
          std::ignore = distribute_tensor(torch::ones({rank == odd_one ? 5 : 4}), mesh, {Shard{0}, Replicate{}}),
          c10::ValueError, "but another rank has Float [");
    });
  }
}

}  // namespace
}  // namespace fsdp
