// What one rank of a mesh finds wrong, every rank hears of.
#include "mesh/agreement.h"

#include "support/parity.h"

namespace fsdp::testing {
namespace {

void expect_agreement(const RankContext& rank, const DeviceMesh& mesh) {
  EXPECT_EQ(is_first_rank(mesh), rank.rank() == 0);
  EXPECT_EQ(text_of_first_rank(mesh, "a text", "text of " + std::to_string(rank.rank())), "text of 0");
  EXPECT_EQ(any_complaint(mesh, "nothing", ""), "");
  for (int who = 0; who < rank.size(); ++who) {
    EXPECT_EQ(any_complaint(mesh, "one", rank.rank() == who ? "no place" : ""), "no place") << "complaint of " << who;
  }
  EXPECT_EQ(any_complaint(mesh, "all", "complaint of " + std::to_string(rank.rank())), "complaint of 0");
}

TEST(Agreement, OverOneAndTwoMeshDims) {
  for (int size : {1, 2, 3, 4}) {
    run_on_ranks(size, [](const RankContext& rank) { expect_agreement(rank, rank.mesh); });
  }
  run_on_ranks(4, [](const RankContext& rank) {
    expect_agreement(rank, mesh_2d(rank, 2, 2, "2x2"));
    expect_agreement(rank, mesh_2d(rank, 4, 1, "4x1"));
  });
}

}  // namespace
}  // namespace fsdp::testing
