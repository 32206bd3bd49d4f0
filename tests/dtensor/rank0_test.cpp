// Whole tensors to and from the first rank of a mesh, under every kind of layout.
#include "dtensor/rank0.h"

#include "support/parity.h"

namespace fsdp::testing {
namespace {

void expect_round_trip(const DeviceMesh& mesh, const Placements& placements, const std::vector<int64_t>& sizes) {
  const auto values = torch::arange(at::Tensor(torch::ones(sizes)).numel(), torch::kFloat).view(sizes);
  const auto text = to_string(placements) + " of " + std::to_string(sizes[0]) + " rows";
  const bool is_first = mesh.get_rank() == 0;

  const auto source = distribute_tensor(values, mesh, placements, std::nullopt).tensor();
  const auto gathered = dtensor::gather_to_first_rank(*dtensor::state_of(source), sizes);
  EXPECT_EQ(gathered.defined(), is_first) << text;
  if (is_first) {
    EXPECT_TRUE(torch::equal(gathered, values)) << text;
    EXPECT_TRUE(gathered.is_contiguous()) << text;
    EXPECT_FALSE(gathered.is_alias_of(DTensor(source).to_local())) << text;
  }

  const auto target = distribute_tensor(torch::zeros(sizes), mesh, placements, std::nullopt).tensor();
  const auto sent = is_first ? values.to(torch::kDouble) : at::Tensor();
  dtensor::scatter_from_first_rank(*dtensor::state_of(target), sizes, sent);
  EXPECT_TRUE(torch::equal(DTensor(target).to_local(), DTensor(source).to_local())) << text;
}

TEST(FirstRank, OverOneMeshDim) {
  for (int size : {1, 2, 3, 4}) {
    run_on_ranks(size, [](const RankContext& rank) {
      for (const auto& placement : {Placement(Shard{0}), Placement(Shard{1}), Placement(Replicate{})}) {
        expect_round_trip(rank.mesh, {placement}, {5, 3});
        expect_round_trip(rank.mesh, {placement}, {8, 4, 2});
        expect_round_trip(rank.mesh, {placement}, {1, 1});
      }
    });
  }
}

TEST(FirstRank, OverTwoMeshDims) {
  run_on_ranks(4, [](const RankContext& rank) {
    const auto mesh = mesh_2d(rank, 2, 2, "grid");
    const std::vector<Placement> kinds{Shard{0}, Shard{1}, Replicate{}};
    for (const auto& outer : kinds) {
      for (const auto& inner : kinds) {
        expect_round_trip(mesh, {outer, inner}, {5, 3});
        expect_round_trip(mesh, {outer, inner}, {1, 7});
      }
    }
  });
}

}  // namespace
}  // namespace fsdp::testing
