// Replicas: their start, gradients that wait for the all-reduce, and parameters that are whole on every rank.
#include "support/parity.h"

namespace fsdp::testing {
namespace {

struct IgnoreWarnings : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

TEST(Replicas, StartWithTheirOwnValuesUntilTheyAreBroadcast) {  // behaviours 100
  run_on_ranks(4, [](const RankContext& rank) {
    const auto mesh = mesh_2d(rank, 2, 2, "start");
    const auto replicas = mesh.get_group("replicate");
    auto net = net_of<ConvNet>()();
    fill_parameters(*net, 10 + rank.rank());
    for (auto& buffer : net->buffers())
      if (buffer.is_floating_point()) buffer.fill_(rank.rank());
    {
      IgnoreWarnings ignore;
      const c10::WarningUtils::WarningHandlerGuard guard(&ignore);
      shard_units(*net, {.mesh = mesh});
    }
    const auto differs = [&](const at::Tensor& local) {
      std::vector<std::vector<at::Tensor>> all{{torch::empty_like(local), torch::empty_like(local)}};
      std::vector<at::Tensor> own{local};
      replicas->allgather(all, own)->wait();
      return !torch::equal(all[0][0], all[0][1]);
    };
    std::vector<at::Tensor> parts;
    for (const auto& parameter : net->parameters()) parts.push_back(DTensor(parameter).to_local());
    for (const auto& part : parts) EXPECT_TRUE(part.numel() == 0 || differs(part)) << part.sizes();
    for (const auto& buffer : net->buffers()) parts.push_back(buffer);
    for (auto& part : parts) {
      if (part.numel() == 0) continue;
      std::vector<at::Tensor> one{part};
      replicas->broadcast(one)->wait();
      EXPECT_FALSE(differs(part));
    }
    net->loss(net->batch(2, seeded(rank.rank()))).backward();
    for (const auto& parameter : net->parameters()) {
      const auto grad = DTensor(parameter.grad()).to_local();
      EXPECT_FALSE(grad.numel() > 0 && differs(grad)) << "one gradient for both replicas";
    }
  });
}

struct UsedByFew : torch::nn::Module {
  at::Tensor always = register_parameter("always", torch::ones({4})),
             rare = register_parameter("rare", torch::ones({4}));
};

// The first backward defers its all-reduce, and only the ranks of the first replica use `rare` in it.
void backward_of_one_replica(UsedByFew& net, FSDPModule& module, const RankContext& rank) {
  module.set_requires_all_reduce(false);
  auto loss = net.always.sum() * (rank.rank() + 1);
  if (rank.rank() < 2) loss = loss + net.rare.sum() * (rank.rank() + 1);
  loss.backward();
  module.set_requires_all_reduce(true);
}

TEST(Replicas, AGradientThatOneReplicaAloneAccumulatedIsAnError) {
  run_on_ranks(4, [](const RankContext& rank) {
    UsedByFew net;
    auto module = fully_shard(net, {.mesh = mesh_2d(rank, 2, 2, "alone")});
    backward_of_one_replica(net, module, rank);
    const auto message = error_of([&] {
      net.always.sum().backward();
      (void)DTensor(net.always.grad()).to_local();
    });
    EXPECT_CONTAINS(message, "'rare' got a gradient on some ranks only");
  });
}

TEST(Replicas, AGroupThatOneReplicaAloneReachesIsAnErrorAtOnce) {
  run_on_ranks(4, [](const RankContext& rank) {
    torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
    fill_parameters(*net, 1);
    const auto mesh = mesh_2d(rank, 2, 2, "group", {"replicate", "shard"}, "gloo", std::chrono::seconds(4));
    for (int i : {0, 1}) fully_shard(*net->ptr(i), {.mesh = mesh});
    auto root = fully_shard(net, {.mesh = mesh});
    root.set_requires_all_reduce(false);
    auto h = net->ptr(0)->as<torch::nn::Linear>()->forward(torch::ones({2, 4}));
    if (rank.rank() < 2) h = net->ptr(1)->as<torch::nn::Linear>()->forward(h);
    const auto message = error_of<c10::DistError>([&] { h.sum().backward(); });
    EXPECT_CONTAINS(message, "the gradients of 1.weight and 1 more");
    EXPECT_CONTAINS(message, "the gradients of 0.weight and 1 more");
  });
}

TEST(Replicas, AGradientThatOneReplicaAccumulatedCountsWhereAllGetOne) {
  run_on_ranks(4, [](const RankContext& rank) {
    UsedByFew net;
    auto module = fully_shard(net, {.mesh = mesh_2d(rank, 2, 2, "counts")});
    backward_of_one_replica(net, module, rank);
    ((net.always.sum() + net.rare.sum()) * 10 * (rank.rank() + 1)).backward();
    EXPECT_LE(difference(torch::full({4}, 27.5), net.always.grad()), 0) << "(10 + 100) / 4";
    EXPECT_LE(difference(torch::full({4}, 25.75), net.rare.grad()), 0) << "(1 + 2 + 100) / 4";
  });
}

TEST(Replicas, ZerosCountWhereTheyAreAskedFor) {
  run_on_ranks(4, [](const RankContext& rank) {
    UsedByFew net;
    auto module = fully_shard(net, {.mesh = mesh_2d(rank, 2, 2, "zeros")});
    module.set_reduce_scatter_unused_params(true);
    backward_of_one_replica(net, module, rank);
    net.always.sum().backward();
    EXPECT_LE(difference(torch::full({4}, 0.75), net.rare.grad()), 0) << "(1 + 2) / 4";
    EXPECT_LE(difference(torch::full({4}, 3.5), net.always.grad()), 0);
  });
}

TEST(ReplicateBelow, SplitsAModuleInTwoGroupsWithoutAllReduceHook) {
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::Linear net(16, 16);
    fill_parameters(*net, 1);
    auto module = fully_shard(net, {.mesh = rank.mesh, .replicate_below = 17});
    const auto message = error_of<c10::ValueError>([&] { module.set_all_reduce_hook([](const at::Tensor&) {}); });
    EXPECT_CONTAINS(message, "Linear has 2 parameter groups");
    EXPECT_CONTAINS(message, "'weight' over 2 ranks, 'bias' whole on 2 ranks");
    EXPECT_CONTAINS(message, "replicate_below");
    module.set_gradient_divide_factor(1);  // of both groups
    net(torch::ones({1, 16})).sum().backward();
    EXPECT_LE(difference(torch::full({16}, 2.0), net->bias.grad()), 0);
    EXPECT_LE(difference(torch::full({16, 16}, 2.0), net->weight.grad()), 0);
  });
}

}  // namespace
}  // namespace fsdp::testing
