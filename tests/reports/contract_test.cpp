// What users of FSDP2 reported about gradients, adapters and precision (field_reports R06, R07, R09, R15) and
// PyTorch's own scenarios about outputs and parameters that only some steps use (behaviours 109, 110, 118, 119).
#include <fsdp/activation_checkpoint.h>

#include "support/parity.h"
#include "support/spawn_ranks.h"

namespace fsdp::testing {
namespace {

struct Parameters : torch::nn::Module {
  explicit Parameters(const std::vector<std::pair<std::string, at::Tensor>>& named) {
    for (const auto& [name, value] : named) register_parameter(name, value.clone());
  }
  at::Tensor& operator[](const std::string& name) { return parameters_[name]; }
};

void use_different_parameters(const RankContext& rank, bool with_checkpoint) {
  Parameters net({{"e0", torch::ones({2})}, {"e1", torch::ones({2})}});
  auto module = fully_shard(net, {.mesh = rank.mesh});
  const auto backward = [&](bool swapped) {
    net.zero_grad();
    const bool first = (rank.rank() == 0) != swapped;
    const auto loss = [factor = rank.rank() == 0 ? 4 : 6](const at::Tensor& e) { return factor * e.sum(); };
    const auto& expert = net[first ? "e0" : "e1"];
    (with_checkpoint ? checkpoint(loss, expert) : loss(expert)).backward();
  };
  module.set_reduce_scatter_unused_params(true);
  backward(false);
  EXPECT_LE(difference(torch::full({2}, 2.0), net["e0"].grad()), 0);
  EXPECT_LE(difference(torch::full({2}, 3.0), net["e1"].grad()), 0);
  backward(true);
  EXPECT_LE(difference(torch::full({2}, 3.0), net["e0"].grad()), 0);
  EXPECT_LE(difference(torch::full({2}, 2.0), net["e1"].grad()), 0);
  module.set_reduce_scatter_unused_params(false);
  backward(false);
  const auto message = error_of([&] { (void)(net[rank.rank() == 0 ? "e0" : "e1"].grad() * 2); });
  EXPECT_CONTAINS(message, "e0");
}

TEST(R06, RanksThatUseDifferentParametersOfOneGroup) {
  for (const bool with_checkpoint : {false, true})
    run_on_ranks(2, [&](const RankContext& rank) { use_different_parameters(rank, with_checkpoint); });
}

RANKS_BODY(fewer_forwards) {
  init_process_group({.timeout = std::chrono::seconds(5)});
  const auto rank = default_rank_context();
  auto net = net_of<Mlp>()();
  shard_units(*net, rank.mesh);
  const auto x = torch::ones({2, 7});
  for (int step = 0; step < (rank.rank() == 0 ? 3 : 2); ++step) net->loss(x).backward();
  rank.group->barrier()->wait();
}

TEST(R07, OneRankDoesFewerForwards) {
  const auto result = spawn_ranks(2, "fewer_forwards", {.limit = std::chrono::seconds(40)});
  EXPECT_FALSE(result.timed_out) << result.describe();
  for (const auto& rank : result.ranks) EXPECT_NE(rank.status.code, 0) << result.describe();
  EXPECT_CONTAINS(result.ranks[0].output, "all_gather of layers.0.weight");
  EXPECT_CONTAINS(result.ranks[0].output, "ranks [1] say nothing");
}

TEST(R09, ThreeWaysToAccumulateAreOneNumber) {
  run_on_ranks(4, [](const RankContext& rank) {
    for (const std::string mode : {"each", "no sync", "deferred"}) {
      Parameters net({{"w", torch::ones({4})}});
      const auto mesh = mode == "deferred" ? mesh_2d(rank, 2, 2, "r09") : rank.mesh;
      auto module = fully_shard(net, {.mesh = mesh});
      if (mode == "no sync") module.set_requires_gradient_sync(false);
      if (mode == "deferred") module.set_requires_all_reduce(false);
      (net["w"].sum() * (rank.rank() + 1)).backward();
      module.set_requires_gradient_sync(true);
      (net["w"].sum() * 10 * (rank.rank() + 1)).backward();
      EXPECT_LE(difference(torch::full({4}, 27.5), net["w"].grad()), 0) << mode;
    }
  });
}

TEST(R09, WhatAccumulationKeepsIsReported) {
  run_on_ranks(4, [](const RankContext& rank) {
    const auto kept = [&](bool sync) {
      Parameters net({{"w", torch::ones({512, 512})}});
      auto module = fully_shard(
          net, {.mesh = rank.mesh, .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
      module.set_requires_gradient_sync(sync);
      net["w"].square().sum().backward();
      return memory_stats(net).gradients.current;
    };
    EXPECT_EQ(kept(false), 1 << 20);
    EXPECT_EQ(kept(true), 1 << 18);
  });
}

TEST(R15, WhoIsCast) {
  for (const int size : {1, 2}) {
    run_on_ranks(size, [](const RankContext& rank) {
      Parameters net({{"w", torch::full({rank.size()}, 1.01)}});
      net.register_buffer("b", torch::ones({rank.size()}));
      fully_shard(net, {.mesh = rank.mesh, .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
      torch::optim::Adam optimizer(net.parameters(), 1e-3);
      const auto y = net["w"] * torch::ones({rank.size()});
      EXPECT_EQ(y[0].item<float>(), 1.0078125F);
      EXPECT_EQ(DTensor(net["w"]).full_tensor()[0].item<float>(), 1.01F);
      y.sum().backward();
      EXPECT_EQ(net["w"].grad().scalar_type(), at::kFloat);
      optimizer.step();
      const auto& state = static_cast<const torch::optim::AdamParamState&>(*optimizer.state().begin()->second);
      EXPECT_EQ(state.exp_avg().scalar_type(), at::kFloat);
      EXPECT_EQ(net.buffers()[0].scalar_type(), at::kFloat);
    });
  }
}

TEST(Behaviours, OutputsThatOnlySomeStepsUse) {  // 109, 110
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    for (int step = 0; step < 4; ++step) {
      twins.both([step](TestNet& net, const at::Tensor& x) {
        auto& layers = *Twins::as<Mlp>(net).layers;
        const auto h = layers.ptr(0)->as<torch::nn::Linear>()->forward(x);
        const auto first = layers.ptr(2)->as<torch::nn::Linear>()->forward(h);
        const auto second = layers.ptr(4)->as<torch::nn::Linear>()->forward(h);
        (step % 2 == 0 ? first : second).square().mean().backward();
      });
      EXPECT_SAME_GRADS(twins, kClose);
      EXPECT_FALSE(twins.q[step % 2 == 0 ? 4 : 2].grad().defined()) << "step " << step;
      twins.zero_grad();
    }
  });
}

TEST(Behaviours, FreezeUnfreezeAndATowerUsedTwice) {  // 118, 119
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    const auto freeze = [&](bool frozen) {
      for (size_t i = 0; i < 4; ++i)
        for (auto* parameters : {&twins.p, &twins.q}) (*parameters)[i].requires_grad_(!frozen);
    };
    freeze(true);
    expect_same_training(twins, {.num_steps = 2});
    {
      const torch::NoGradGuard no_grad;
      EXPECT_LE(difference(twins.plain->loss(twins.part), twins.sharded->loss(twins.part)), kClose);
    }
    freeze(false);
    expect_same_training(twins, {.num_steps = 2});
    freeze(true);
    twins.zero_grad();
    twins.both([](TestNet& net, const at::Tensor& x) { (net.loss(x) + net.loss(x * 2)).backward(); });
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

}  // namespace
}  // namespace fsdp::testing
