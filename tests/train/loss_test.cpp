// Losses over the tokens of all ranks: the gradients are those of one process on all tokens.
#include <fsdp/loss.h>

#include "support/parity.h"

namespace fsdp::testing {
namespace {

// The sum of the losses of the first `num_rows` rows; a row stands for a token.
at::Tensor loss_sum_of(TestNet& net, const at::Tensor& x, int64_t num_rows) {
  return net.forward(x).square().sum(1).narrow(0, 0, num_rows).sum();
}

// Rank r has r tokens, so rank 0 none; a lone rank has all of its two.
int64_t num_tokens_of(int rank, int size) { return size == 1 ? 2 : rank; }

int64_t num_tokens_of_all(int size) {
  int64_t sum = 0;
  for (int rank = 0; rank < size; ++rank) sum += num_tokens_of(rank, size);
  return sum;
}

// Of the plain net on the rows that count of all ranks.
at::Tensor joined_mean(TestNet& net, const at::Tensor& x, int size) {
  const auto rows_per_rank = x.size(0) / size;
  auto sum = torch::zeros({});
  for (int rank = 0; rank < size; ++rank) {
    sum = sum + loss_sum_of(net, x.narrow(0, rank * rows_per_rank, rows_per_rank), num_tokens_of(rank, size));
  }
  return sum / num_tokens_of_all(size);
}

TEST(Loss, UnevenTokensGiveTheGradientsOfTheJoinedBatch) {
  for (const int size : {1, 2, 3, 4}) {
    run_on_ranks(size, [](const RankContext& rank) {
      Twins twins(rank, net_of<Mlp>(), {.rows_per_rank = 3});
      const auto num_tokens = num_tokens_of(rank.rank(), rank.size());
      const auto reference = joined_mean(*twins.plain, twins.joined, rank.size());
      reference.backward();
      const auto loss =
          fsdp::mean_over_ranks(loss_sum_of(*twins.sharded, twins.part, num_tokens), num_tokens, rank.mesh);
      loss.backward();
      EXPECT_NEAR(mean_over_ranks(loss, rank.group), reference.item<double>(), 1e-5);
      EXPECT_SAME_GRADS(twins, kClose);
    });
  }
}

TEST(Loss, TheMeanOfMeansIsAnotherLoss) {
  run_on_ranks(2, [](const RankContext& rank) {  // one token with loss 10, three with loss 2
    const bool is_first = rank.rank() == 0;
    const auto sum = torch::tensor(is_first ? 10.F : 6.F, torch::requires_grad());
    const auto loss = fsdp::mean_over_ranks(sum, is_first ? 1 : 3, rank.group);
    loss.backward();
    EXPECT_NEAR(mean_over_ranks(loss, rank.group), 4.0, 1e-6) << "a mean of means is 6";
    EXPECT_NEAR(sum.grad().item<double>(), 0.5, 1e-6) << "2 ranks / 4 tokens";
  });
}

TEST(Loss, WithoutTokensOnAnyRankZeroWithAGraph) {
  run_on_ranks(3, [](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    const auto loss = fsdp::mean_over_ranks(loss_sum_of(*twins.sharded, twins.part, 0), 0, rank.mesh);
    EXPECT_EQ(loss.item<double>(), 0.0);
    loss.backward();
    for (const auto& grad : grads(twins.q)) {
      ASSERT_TRUE(grad.defined());
      EXPECT_EQ(whole(grad).abs().sum().item<double>(), 0.0);
    }
  });
}

TEST(Loss, OverBothDimsOfAMesh) {
  run_on_ranks(4, [](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>(), {.rows_per_rank = 3, .shard = false});
    const auto mesh = mesh_2d(rank, 2, 2, "loss");
    shard_units(*twins.sharded, mesh);
    const auto num_tokens = num_tokens_of(rank.rank(), 4);
    joined_mean(*twins.plain, twins.joined, 4).backward();
    fsdp::mean_over_ranks(loss_sum_of(*twins.sharded, twins.part, num_tokens), num_tokens, mesh).backward();
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

TEST(Loss, OneWeightForAllMicroBatches) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>(), {.rows_per_rank = 3});
    joined_mean(*twins.plain, twins.joined, rank.size()).backward();
    const auto num_tokens = num_tokens_of(rank.rank(), rank.size());
    const auto weight = token_weight(num_tokens, rank.mesh);
    for (int64_t row = 0; row < 3; ++row) {
      const auto micro_batch = twins.part.narrow(0, row, 1);
      (loss_sum_of(*twins.sharded, micro_batch, row < num_tokens ? 1 : 0) * weight).backward();
    }
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

TEST(Loss, AWrongArgumentFailsOnEveryRank) {
  run_on_ranks(2, [](const RankContext& rank) {
    const bool is_wrong = rank.rank() == 1;
    const auto fine = torch::ones({});
    const auto say = [&](const at::Tensor& sum, int64_t num_tokens) {
      return error_of<c10::ValueError>([&] { std::ignore = fsdp::mean_over_ranks(sum, num_tokens, rank.mesh); });
    };
    const std::string others = "1 other ranks gave a wrong loss";
    EXPECT_CONTAINS(say(fine, is_wrong ? -3 : 2), is_wrong ? "num_tokens is -3" : others);
    EXPECT_CONTAINS(say(is_wrong ? torch::ones({2}) : fine, 2), is_wrong ? "loss_sum is Float of shape [2]" : others);
    EXPECT_CONTAINS(say(is_wrong ? torch::ones({}, torch::kLong) : fine, 2), is_wrong ? "loss_sum is Long" : others);
    EXPECT_CONTAINS(say(is_wrong ? at::Tensor() : fine, 2), is_wrong ? "undefined" : others);
    const auto weight = error_of<c10::ValueError>([&] { std::ignore = token_weight(is_wrong ? -3 : 2, rank.mesh); });
    EXPECT_CONTAINS(weight, is_wrong ? "token_weight: num_tokens is -3" : "token_weight: 1 other ranks");
    const auto mean = error_of<c10::ValueError>([&] { std::ignore = token_mean(fine, is_wrong ? -3 : 2, rank.mesh); });
    EXPECT_CONTAINS(mean, is_wrong ? "token_mean: num_tokens is -3" : "token_mean: 1 other ranks");
  });
}

TEST(Loss, ARankThatDoesNotComeIsNamed) {
  run_on_ranks(
      2,
      [](const RankContext& rank) {
        if (rank.rank() == 1) return;
        const auto message = error_of<c10::DistError>([&] { std::ignore = token_weight(1, rank.mesh); });
        EXPECT_CONTAINS(message, "counts the tokens of all ranks");
        EXPECT_CONTAINS(message, "ranks [1] did not come");
      },
      std::chrono::seconds(4));
}

}  // namespace
}  // namespace fsdp::testing
