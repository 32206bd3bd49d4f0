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

  const auto differences = [&](const std::string& record) {
    return compare_with_first_rank(mesh, "records", record,
                                   [&](const std::string& first) { return record + ", not " + first; });
  };
  EXPECT_EQ(differences("same"), "");
  for (int who = 1; who < rank.size(); ++who)
    EXPECT_EQ(differences(rank.rank() == who ? "other" : "same"), "other, not same") << "record of " << who;
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

TEST(Agreement, ChecksumsSeeImaginaryParts) {
  const auto values = torch::complex(torch::ones({2}), torch::ones({2}));
  EXPECT_EQ(checksum(values), checksum(values.clone()));
  EXPECT_NE(checksum(values), checksum(torch::complex(torch::ones({2}), torch::zeros({2}))));
}

}  // namespace
}  // namespace fsdp::testing
