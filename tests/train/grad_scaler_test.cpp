// Loss scaling over sharded gradients: all ranks step or all skip. The first test is the one of PyTorch's own suite.
#include <fsdp/grad_scaler.h>
#include <torch/nn/utils/clip_grad.h>

#include "support/errors.h"
#include "support/parity.h"

namespace fsdp::testing {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

std::vector<at::Tensor> local_grads(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> result;
  for (const auto& grad : grads(parameters)) result.push_back(DTensor(grad).to_local().clone());
  return result;
}

std::vector<at::Tensor> local_values(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> result;
  for (const auto& parameter : parameters) result.push_back(DTensor(parameter).to_local().detach().clone());
  return result;
}

void expect_unscaled_then_stepped(const RankContext& rank, const DeviceMesh& mesh, bool has_inf) {
  Twins twins(rank, net_of<Mlp>(), {.shard = false});
  shard_units(*twins.sharded, mesh);
  torch::optim::Adam optimizer(twins.q, torch::optim::AdamOptions(1e-2));
  GradScaler scaler({.init_scale = 2.0});
  scaler.scale(twins.sharded->loss(twins.part)).backward();
  if (has_inf && rank.rank() == 0) DTensor(twins.q[0].grad()).to_local()[0][0].fill_(kInf);
  const auto scaled = local_grads(twins.q), before = local_values(twins.q);

  scaler.unscale_(optimizer);
  const auto unscaled = local_grads(twins.q);
  for (size_t i = 0; i < scaled.size(); ++i) EXPECT_TRUE(torch::equal(unscaled[i], scaled[i] * 0.5)) << i;
  EXPECT_ERROR(scaler.unscale_(optimizer), c10::Error, "unscale_() has already been called");

  EXPECT_EQ(scaler.step(optimizer), !has_inf);
  EXPECT_EQ(optimizer.state().empty(), has_inf);
  EXPECT_EQ(difference(before, local_values(twins.q)) == 0.0, has_inf) << "has_inf " << has_inf;
  EXPECT_ERROR(scaler.step(optimizer), c10::Error, "step() has already been called");

  scaler.update();
  EXPECT_EQ(scaler.get_scale(), has_inf ? 1.0 : 2.0);
  scaler.unscale_(optimizer);  // ready again
}

TEST(GradScaler, UnscalesThenStepsOrSkips) {
  for (const bool has_inf : {false, true}) {
    for (const int size : {1, 2, 3, 4}) {
      run_on_ranks(size, [&](const RankContext& rank) { expect_unscaled_then_stepped(rank, rank.mesh, has_inf); });
    }
    run_on_ranks(
        4, [&](const RankContext& rank) { expect_unscaled_then_stepped(rank, mesh_2d(rank, 2, 2, "hsdp"), has_inf); });
  }
}

// Each rank sees the infs of its own rows only; the scale must stay one.
TEST(GradScaler, AnInfOrNanOnOneRankStopsAll) {
  for (const double bad : {kInf, -kInf, std::nan("")}) {
    run_on_ranks(3, [&](const RankContext& rank) {
      Twins twins(rank, square_mlp());
      const auto optimizer = sgd()(twins.q);
      GradScaler scaler({.init_scale = 1024.0});
      for (int culprit = 0; culprit < 3; ++culprit) {
        const auto before = local_values(twins.q);
        scaler.scale(twins.sharded->loss(twins.part)).backward();
        auto part = DTensor(twins.q[0].grad()).to_local();
        if (rank.rank() == culprit) part[0][0].fill_(bad);
        EXPECT_FALSE(scaler.step(*optimizer)) << "rank " << culprit << " has it";
        scaler.update();
        EXPECT_EQ(scaler.get_scale(), 512.0 / (1 << culprit));
        EXPECT_EQ(difference(before, local_values(twins.q)), 0.0);
        twins.zero_grad();
      }
      scaler.scale(twins.sharded->loss(twins.part)).backward();
      EXPECT_TRUE(scaler.step(*optimizer));
    });
  }
}

// An overflow in the loss of one rank reaches the shards of all; the steps around it are those of one process.
TEST(GradScaler, TrainingWithOverflowsAsOneProcess) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    const auto optimizer_p = sgd()(twins.p), optimizer_q = sgd()(twins.q);
    const GradScalerOptions options{.init_scale = 256.0, .growth_interval = 2};
    GradScaler scaler_p(options), scaler_q(options);
    for (int step = 0; step < 6; ++step) {
      const double factor = step == 3 ? 1e38 : 1.0;
      const double own_factor = rank.rank() == rank.size() - 1 ? factor : 1.0;
      scaler_p.scale(twins.plain->loss(twins.joined) * factor).backward();
      scaler_q.scale(twins.sharded->loss(twins.part) * own_factor).backward();
      EXPECT_EQ(scaler_p.step(*optimizer_p), step != 3);
      EXPECT_EQ(scaler_q.step(*optimizer_q), step != 3);
      scaler_p.update();
      scaler_q.update();
      EXPECT_EQ(scaler_q.get_scale(), scaler_p.get_scale()) << "step " << step;
      EXPECT_SAME_PARAMETERS(twins, 1e-5);
      twins.zero_grad();
      twins.next_batch();
    }
    EXPECT_EQ(scaler_q.get_scale(), 512.0) << "256, grows after steps 1 and 5, halves at 3";
  });
}

TEST(GradScaler, ClippingBetweenUnscaleAndStep) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    GradScaler scaler;
    const auto optimizer_p = sgd()(twins.p), optimizer_q = sgd()(twins.q);
    twins.plain->loss(twins.joined).backward();
    scaler.scale(twins.sharded->loss(twins.part)).backward();
    scaler.unscale_(*optimizer_q);
    EXPECT_SAME_GRADS(twins, kClose);
    const auto norm = torch::nn::utils::clip_grad_norm_(twins.p, 0.01);
    EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(twins.q, 0.01), norm, 1e-5 * norm);
    optimizer_p->step();
    EXPECT_TRUE(scaler.step(*optimizer_q));
    EXPECT_SAME_PARAMETERS(twins, kClose);
  });
}

TEST(GradScaler, PlainAndShardedParametersInOneOptimizer) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    auto plain = torch::ones({2}, torch::requires_grad());
    auto parameters = twins.q;
    parameters.push_back(plain);
    const auto optimizer = sgd()(parameters);
    GradScaler scaler({.init_scale = 4.0});
    scaler.scale(twins.sharded->loss(twins.part) + plain.sum()).backward();
    scaler.unscale_(*optimizer);
    EXPECT_TRUE(torch::equal(plain.grad(), torch::ones({2})));
    EXPECT_TRUE(scaler.step(*optimizer));
    scaler.update();
    scaler.scale(plain.sum()).backward();
    if (rank.rank() == 1) plain.mutable_grad()[0] = kInf;
    EXPECT_FALSE(scaler.step(*optimizer)) << "also on rank 0";
  });
}

TEST(GradScaler, TwoOptimizersShareOneScale) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    const auto first = sgd()({twins.q[0], twins.q[1]}), rest = sgd()({twins.q.begin() + 2, twins.q.end()});
    GradScaler scaler({.init_scale = 4.0});
    scaler.scale(twins.sharded->loss(twins.part)).backward();
    if (rank.rank() == 1) DTensor(twins.q[0].grad()).to_local()[0][0].fill_(kInf);
    EXPECT_FALSE(scaler.step(*first));
    EXPECT_TRUE(scaler.step(*rest));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 2.0);
  });
}

TEST(GradScaler, ScalesThatDifferRaiseOnEveryRank) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    const auto optimizer = sgd()(twins.q);
    GradScaler scaler({.init_scale = rank.rank() == 0 ? 2.0 : 8.0});
    scaler.scale(twins.sharded->loss(twins.part)).backward();
    EXPECT_ERROR(scaler.step(*optimizer), c10::Error, "scales of the ranks differ, from 2 to 8");
  });
}

TEST(GradScaler, ARankThatDoesNotComeIsNamed) {
  run_on_ranks(
      2,
      [](const RankContext& rank) {
        Twins twins(rank, square_mlp());
        const auto optimizer = sgd()(twins.q);
        GradScaler scaler;
        scaler.scale(twins.sharded->loss(twins.part)).backward();
        if (rank.rank() == 1) return;
        const auto message = error_of<c10::DistError>([&] { scaler.step(*optimizer); });
        EXPECT_CONTAINS(message, "agrees whether all gradients are finite");
        EXPECT_CONTAINS(message, "ranks [1] did not come");
      },
      std::chrono::seconds(4));
}

}  // namespace
}  // namespace fsdp::testing
