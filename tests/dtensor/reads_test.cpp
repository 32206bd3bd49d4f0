// Reading a sharded tensor: right on all ranks when all read, a readable error for those who read alone.
#include "support/parity.h"

namespace fsdp::testing {
namespace {

constexpr std::chrono::milliseconds kTimeout{3000};

struct NamedRead {
  const char* name;
  const char* op;  // part of the operator's name that the error gives
  std::function<void(const at::Tensor&)> read;
};

std::vector<NamedRead> all_reads() {
  return {
      {"norm", "item", [](const at::Tensor& p) { p.norm().item<double>(); }},
      {"element", "", [](const at::Tensor& p) { p[0][0].item<double>(); }},
      {"print", "", [](const at::Tensor& p) { std::ostringstream() << p; }},
      {"full_tensor", "full_tensor", [](const at::Tensor& p) { (void)DTensor(p).full_tensor(); }},
      {"copy", "",
       [](const at::Tensor& p) {
         torch::zeros({16, 16}).copy_(p);
       }},
  };
}

std::string name_of_read(const ::testing::TestParamInfo<size_t>& info) { return all_reads()[info.param].name; }

class ReadOnAllRanks : public ::testing::TestWithParam<size_t> {};
class ReadOnOneRank : public ::testing::TestWithParam<size_t> {};

TEST_P(ReadOnAllRanks, Works) {
  const auto read = all_reads()[GetParam()].read;
  on_two_and_three([&](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    const torch::NoGradGuard no_grad;
    read(twins.q[2]);
    twins.sharded->forward(twins.part);
    read(twins.q[2]);
    EXPECT_SAME_PARAMETERS(twins, 0);
  });
}

// The reader is told after at most half the group's timeout; then everybody trains on.
TEST_P(ReadOnOneRank, IsAnErrorForTheReaderAndAllTrainOn) {
  const auto [name, op, read] = all_reads()[GetParam()];
  for (int size : {2, 3}) {
    run_on_ranks(
        size,
        [&, op = op, read = read](const RankContext& rank) {
          Twins twins(rank, square_mlp());
          expect_same_training(twins, {.num_steps = 2});
          if (rank.rank() == 0) {
            const torch::NoGradGuard no_grad;
            const auto start = std::chrono::steady_clock::now();
            const auto message = error_of<c10::DistError>([&] { read(twins.q[2]); });
            EXPECT_LT(std::chrono::steady_clock::now() - start, kTimeout * 3 / 4);
            EXPECT_CONTAINS(message, op);
            EXPECT_CONTAINS(message, "layers.2.weight");
            EXPECT_CONTAINS(message, size == 2 ? "1" : "1, 2");
          }
          expect_same_training(twins, {.num_steps = 2});
        },
        kTimeout);
  }
}

INSTANTIATE_TEST_SUITE_P(AllKinds, ReadOnAllRanks, ::testing::Range(size_t{0}, all_reads().size()), name_of_read);
INSTANTIATE_TEST_SUITE_P(AllKinds, ReadOnOneRank, ::testing::Range(size_t{0}, all_reads().size()), name_of_read);

TEST(Reads, OfDifferentParametersAreErrorsForBothReaders) {
  run_on_ranks(
      3,
      [](const RankContext& rank) {
        Twins twins(rank, net_of<Mlp>(16, 16, 16, 16));
        expect_same_training(twins, {.num_steps = 2});
        if (rank.rank() < 2) {
          const auto& mine = twins.q[rank.rank() == 0 ? 0 : 2];
          const auto message = error_of<c10::DistError>([&] { (void)whole(mine); });
          EXPECT_CONTAINS(message, rank.rank() == 0 ? "layers.0.weight" : "layers.2.weight");
        }
        expect_same_training(twins, {.num_steps = 2});
      },
      kTimeout);
}

TEST(Reads, AReaderThatLeavesMakesTheOthersFailNamingTheirCollective) {
  run_on_ranks(
      2,
      [](const RankContext& rank) {
        Twins twins(rank, square_mlp());
        expect_same_training(twins, {.num_steps = 2});
        if (rank.rank() == 0) {
          EXPECT_NE(error_of<c10::DistError>([&] { (void)whole(twins.q[0]); }), "");
          return;
        }
        const auto message = error_of<c10::DistError>([&] {
          for (int step = 0; step < 3; ++step) {
            twins.sharded->loss(twins.part).backward();
          }
        });
        EXPECT_CONTAINS(message, "gather");
        EXPECT_CONTAINS(message, "rank 1");
      },
      kTimeout);
}

TEST(Reads, AFirstForwardOnOneRankOnlyIsAnErrorThere) {
  run_on_ranks(
      2,
      [](const RankContext& rank) {
        Twins twins(rank, square_mlp());
        if (rank.rank() == 0) {
          const torch::NoGradGuard no_grad;
          EXPECT_CONTAINS(error_of<c10::DistError>([&] { twins.sharded->forward(twins.part); }), "layers.0");
          rank.store->set("error seen", std::vector<uint8_t>{1});
        }
        rank.store->wait({"error seen"}, kTimeout);
        expect_same_training(twins, {.num_steps = 2});
      },
      kTimeout);
}

TEST(Reads, GiveWhatAPlainTensorGives) {
  for (int size : {1, 2, 3, 4}) {
    run_on_ranks(size, [](const RankContext& rank) {
      Twins twins(rank, net_of<Mlp>());
      twins.backward();
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < twins.p.size(); ++i) {
        for (const auto& [plain, sharded] :
             {std::pair(twins.p[i], twins.q[i]), std::pair(twins.p[i].grad(), twins.q[i].grad())}) {
          for (double order : {1.0, 2.0, 3.0, 0.0, std::numeric_limits<double>::infinity()}) {
            EXPECT_NEAR(plain.norm(order).item<double>(), sharded.norm(order).item<double>(), 1e-5) << order;
          }
          EXPECT_NEAR(plain.sum().item<double>(), sharded.sum().item<double>(), 1e-5);
          EXPECT_NEAR(plain.mean().item<double>(), sharded.mean().item<double>(), 1e-6);
          EXPECT_NEAR(plain.min().item<double>(), sharded.min().item<double>(), 1e-6);
          EXPECT_NEAR(plain.max().item<double>(), sharded.max().item<double>(), 1e-6);
          EXPECT_NEAR(plain.abs().max().item<double>(), sharded.abs().max().item<double>(), 1e-6);
          EXPECT_NEAR(plain.flatten()[0].item<double>(), sharded.flatten()[0].item<double>(), 1e-6);
          EXPECT_TRUE(at::isfinite(sharded).all().item<bool>());
          EXPECT_FALSE(at::isnan(sharded).any().item<bool>());
          EXPECT_TRUE(at::allclose(plain, sharded, 1e-4, 1e-6));
        }
        EXPECT_TRUE(at::equal(twins.p[i], twins.q[i]));
        EXPECT_FALSE(at::equal(twins.p[i] + 1, twins.q[i]));
      }
      std::ostringstream plain_text, sharded_text;
      plain_text << twins.p[0];
      sharded_text << twins.q[0];
      EXPECT_EQ(plain_text.str(), sharded_text.str());
    });
  }
}

TEST(Reads, ToLocalNeedsNobodyElse) {
  run_on_ranks(3, [](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    if (rank.rank() == 1) {
      const auto local = DTensor(twins.q[0]).to_local();
      EXPECT_EQ(local.sizes(), (at::IntArrayRef{5, 7}));
      EXPECT_LE(difference(twins.p[0].narrow(0, 5, 5), local), 0);
    }
    twins.backward();
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

}  // namespace
}  // namespace fsdp::testing
