// Collectives over a mesh with rows that do not divide: pad, move, cut.
#include <fsdp/device_mesh.h>
#include <gtest/gtest.h>

#include "comm/collectives.h"
#include "support/run_ranks.h"

namespace fsdp {
namespace {

using testing::run_ranks;

int64_t rows_each(int64_t num_rows, int64_t size) { return (num_rows + size - 1) / size; }

at::Tensor padded(const at::Tensor& whole, int64_t num_rows) {
  return torch::constant_pad_nd(whole, {0, 0, 0, num_rows - whole.size(0)});
}

TEST(MeshCollectives, UnevenRowsComeBackExact) {
  constexpr int kSize = 4;
  for (const int64_t num_rows : {kSize + 3, kSize + 1}) {
    run_ranks(kSize, [&](const ProcessGroup& group, int rank) {
      const auto mesh = DeviceMesh::from_group(group, torch::kCPU);
      const auto whole = torch::arange(num_rows * 3, torch::kFloat).view({num_rows, 3});
      const int64_t each = rows_each(num_rows, kSize);
      const auto own = padded(whole, each * kSize).narrow(0, rank * each, each).contiguous();

      auto gathered = torch::empty({each * kSize, 3});
      comm::all_gather(gathered, own, mesh.get_group(), "rows").wait();
      EXPECT_TRUE(torch::equal(gathered.narrow(0, 0, num_rows), whole));

      auto reduced = torch::empty({each, 3});
      comm::reduce_scatter(reduced, padded(whole, each * kSize), mesh.get_group(), "rows").wait();
      EXPECT_TRUE(torch::equal(reduced, own * kSize));

      auto copy = rank == 2 ? whole.clone() : torch::empty_like(whole);
      comm::broadcast(copy, 2, mesh.get_group(), "rows").wait();
      EXPECT_TRUE(torch::equal(copy, whole));
    });
  }
}

TEST(MeshCollectives, ReduceScatterOfATransposedInputIsRight) {
  run_ranks(2, [](const ProcessGroup& group, int rank) {
    const auto mesh = DeviceMesh::from_group(group, torch::kCPU);
    const auto input = torch::arange(8, torch::kFloat).view({2, 4}).t();  // [4, 2], not contiguous
    auto output = torch::empty({2, 2});
    comm::reduce_scatter(output, input.contiguous(), mesh.get_group(), "rows").wait();
    EXPECT_TRUE(torch::equal(output, input.narrow(0, int64_t{rank} * 2, 2) * 2));
  });
}

}  // namespace
}  // namespace fsdp
