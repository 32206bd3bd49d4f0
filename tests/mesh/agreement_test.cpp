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

  EXPECT_EQ(difference_between_ranks(mesh, "listings", "a\nb"), "");
  for (int who = 1; who < rank.size(); ++who)
    EXPECT_EQ(difference_between_ranks(mesh, "listings", rank.rank() == who ? "a\nc" : "a\nb"),
              "the first rank has 'b', rank " + std::to_string(who) + " has 'c'");
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

// Two ranks that are in no row with the first, nor with each other.
TEST(Agreement, OfSeveralComplaintsAllRanksHearTheSame) {
  run_on_ranks(6, [](const RankContext& rank) {
    const auto mesh = mesh_2d(rank, 2, 3, "2x3");
    const auto own = rank.rank() == 1 || rank.rank() == 5 ? "complaint of " + std::to_string(rank.rank()) : "";
    for (int i = 0; i < 10; ++i) {
      const auto heard = any_complaint(mesh, "two", own);
      EXPECT_NE(heard, "");
      EXPECT_EQ(heard, text_of_first_rank(mesh, "what the first heard", heard));
    }
  });
}

TEST(Agreement, ChecksumsSeeTheOrderAndSmallDifferences) {
  const auto tokens = torch::arange(12).view({3, 4}) + 100'000;
  EXPECT_EQ(checksum(tokens), checksum(tokens.clone()));
  EXPECT_NE(checksum(tokens), checksum(tokens.flip(0)));
  EXPECT_NE(checksum(tokens), checksum(tokens.flip(1)));
  auto other = tokens.clone();
  other[1][2] += 1;
  EXPECT_NE(checksum(tokens), checksum(other));
  EXPECT_EQ(checksum(torch::ones({})), checksum(torch::ones({})));
  EXPECT_EQ(checksum(torch::ones({0, 3})), checksum(torch::zeros({0, 3})));
}

TEST(Agreement, ChecksumsSeeImaginaryParts) {
  const auto values = torch::complex(torch::ones({2}), torch::ones({2}));
  EXPECT_EQ(checksum(values), checksum(values.clone()));
  EXPECT_NE(checksum(values), checksum(torch::complex(torch::ones({2}), torch::zeros({2}))));
}

}  // namespace
}  // namespace fsdp::testing
