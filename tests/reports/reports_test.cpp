// Scenarios with exact expected values, from what users of sharded training ran into.
#include "support/counting_backend.h"
#include "support/parity.h"

namespace fsdp::testing {
namespace {

struct Vector : torch::nn::Module {
  explicit Vector(at::Tensor values) { w = register_parameter("w", std::move(values)); }
  at::Tensor w;
};

// loss on rank r is (r + 1) * sum(w): every gradient is the mean of 1 .. W.
void expect_mean_gradient(const RankContext& rank, const DeviceMesh& mesh, int64_t num_elements, double expected) {
  Vector net(torch::ones({num_elements}));
  fully_shard(net, {.mesh = mesh});
  ((rank.rank() + 1) * net.w.sum()).backward();
  EXPECT_LE(difference(torch::full({num_elements}, expected), net.w.grad()), 0);
  const auto local = DTensor(net.w.grad()).to_local();
  EXPECT_LE(difference(torch::full(local.sizes(), expected), local), 0);
}

TEST(MeanGradient, OverOneDim) {  // behaviours 44, R01 (a)
  run_on_ranks(1, [](const RankContext& rank) { expect_mean_gradient(rank, rank.mesh, 4, 1.0); });
  run_on_ranks(2, [](const RankContext& rank) { expect_mean_gradient(rank, rank.mesh, 4, 1.5); });
  run_on_ranks(3, [](const RankContext& rank) { expect_mean_gradient(rank, rank.mesh, 6, 2.0); });
  run_on_ranks(4, [](const RankContext& rank) { expect_mean_gradient(rank, rank.mesh, 5, 2.5); });
}

TEST(MeanGradient, OverEveryShapeOfTwoDims) {  // R01 (b)
  run_on_ranks(2, [](const RankContext& rank) {
    expect_mean_gradient(rank, mesh_2d(rank, 2, 1, "2x1"), 4, 1.5);
    expect_mean_gradient(rank, mesh_2d(rank, 1, 2, "1x2"), 4, 1.5);
  });
  run_on_ranks(4, [](const RankContext& rank) {
    expect_mean_gradient(rank, mesh_2d(rank, 2, 2, "2x2"), 4, 2.5);
    expect_mean_gradient(rank, mesh_2d(rank, 4, 1, "4x1"), 4, 2.5);
    expect_mean_gradient(rank, mesh_2d(rank, 1, 4, "1x4"), 4, 2.5);
  });
}

TEST(TwoMeshDims, TrainAsOneProcess) {
  run_on_ranks(4, [](const RankContext& rank) {
    RankContext grid = rank;
    grid.mesh = mesh_2d(rank, 2, 2, "grid");
    Twins twins(grid, net_of<Mlp>(), {.shard = false});
    shard_units(*twins.sharded, grid.mesh);
    const DTensor weight(twins.q[0]);
    EXPECT_EQ(weight.placements(), (Placements{Replicate{}, Shard{0}}));
    EXPECT_EQ(weight.to_local().size(0), rank.rank() % 2 == 0 ? 7 : 6);
    expect_same_training(twins, {.optimizer = all_optimizers()[5].make});
  });
}

// Wrapping does not synchronise replicas; sync_init does.
TEST(TwoMeshDims, ReplicasKeepTheirOwnValuesUnlessSynchronised) {
  run_on_ranks(4, [](const RankContext& rank) {
    for (bool sync : {false, true}) {
      const auto mesh = mesh_2d(rank, 2, 2, sync ? "synced" : "own");
      const int64_t replica = rank.rank() / 2;
      Vector net(torch::full({4}, static_cast<float>(replica)));
      struct Ignore : c10::WarningHandler {
        void process(const c10::Warning&) override {}
      } ignore;
      const c10::WarningUtils::WarningHandlerGuard guard(&ignore);
      fully_shard(net, {.mesh = mesh, .sync_init = sync});
      EXPECT_LE(difference(torch::full({2}, sync ? 0.F : static_cast<float>(replica)), DTensor(net.w).to_local()), 0);
    }
  });
}

// A forward before the optimizer is built must not hand it other tensors.
TEST(Handles, OptimizerBuiltAfterAForward) {  // R12
  run_on_ranks(2, [](const RankContext& rank) {
    Vector net(torch::ones({8}));
    fully_shard(net, {.mesh = rank.mesh});
    (void)net.w.sum();
    torch::optim::SGD optimizer(net.parameters(), torch::optim::SGDOptions(0.1));
    for (double expected : {0.9, 0.8}) {
      optimizer.zero_grad();
      net.w.sum().backward();
      optimizer.step();
      EXPECT_LE(difference(torch::full({8}, expected), net.w), 1e-6);
    }
  });
}

TEST(Handles, OptimizerBuiltBeforeWrapping) {  // R12
  run_on_ranks(2, [](const RankContext& rank) {
    Vector net(torch::ones({8}));
    torch::optim::SGD optimizer(net.parameters(), torch::optim::SGDOptions(0.1));
    fully_shard(net, {.mesh = rank.mesh});
    net.w.sum().backward();
    optimizer.step();
    EXPECT_LE(difference(torch::full({8}, 0.9), net.w), 1e-6) << "it holds the tensor that is sharded now";
  });
}

TEST(Handles, MemberAndRegisteredParameterAreOneTensor) {  // R12
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::Linear net(3, 5);
    fill_parameters(*net, 1);
    fully_shard(net, {.mesh = rank.mesh});
    const auto check = [&] {
      EXPECT_TRUE(net->weight.is_same(net->named_parameters()["weight"]));
      EXPECT_EQ(net->weight.sizes(), (at::IntArrayRef{5, 3}));
      EXPECT_EQ(DTensor(net->weight).to_local().sizes(), (at::IntArrayRef{rank.rank() == 0 ? 3 : 2, 3}));
    };
    check();
    auto y = net(torch::ones({2, 3}));
    check();
    y.sum().backward();
    check();
  });
}

TEST(OtherMethods, WorkWithoutRegistration) {  // R13
  run_on_ranks(2, [](const RankContext& rank) {
    struct Encoder : Vector {
      using Vector::Vector;
      at::Tensor encode(double x) { return w * x; }
    };
    Encoder net(torch::arange(1, 5, torch::kFloat));
    fully_shard(net, {.mesh = rank.mesh});
    EXPECT_LE(difference(2 * torch::arange(1, 5, torch::kFloat), net.encode(2)), 0);
    EXPECT_EQ(DTensor(net.w).to_local().size(0), 2);
    EXPECT_LE(difference(torch::arange(2, 6, torch::kFloat), net.w + torch::ones({4})), 0) << "plain and sharded";
    EXPECT_LE(difference(torch::arange(2, 6, torch::kFloat), torch::ones({4}) + net.w), 0) << "sharded and plain";
  });
}

TEST(OneRank, NeedsNoCollective) {  // behaviours 39
  run_on_ranks(1, [](const RankContext& rank) {
    RankContext counted = rank;
    counted.group = make_counting_group(rank.store, 0, 1);
    counted.mesh = DeviceMesh::from_group(counted.group, torch::kCPU, {"dp"});
    Twins twins(counted, net_of<Blocks>());
    auto optimizer_p = sgd()(twins.p), optimizer_q = sgd()(twins.q);
    const auto before = counts_of(counted.group).num_collectives();
    for (int step = 0; step < 3; ++step) {
      twins.zero_grad();
      twins.backward();
      EXPECT_SAME_GRADS(twins, kClose);
      optimizer_p->step();
      optimizer_q->step();
      EXPECT_SAME_PARAMETERS(twins, kClose);
    }
    EXPECT_EQ(counts_of(counted.group).num_collectives(), before);
  });
}

TEST(FirstStep, IssuesTheCollectivesOfTheSecond) {  // R17
  run_on_ranks(4, [](const RankContext& rank) {
    const auto counted = on_counting_group(rank);
    const auto& counts = counts_of(counted.group);
    torch::nn::Sequential net;
    for (int i = 0; i < 48; ++i) net->push_back(torch::nn::Linear(4, 4));
    fill_parameters(*net, 1);
    for (int i = 0; i < 48; ++i) fully_shard(*net->ptr(i), {.mesh = counted.mesh});
    fully_shard(net, {.mesh = counted.mesh});
    std::vector<int> collectives;
    for (int step = 0; step < 3; ++step) {
      const auto all = counts.num_collectives(), others = all - counts.num_all_gathers() - counts.num_reduce_scatters();
      net->forward(torch::ones({2, 4})).square().mean().backward();
      collectives.push_back(counts.num_collectives() - all);
      EXPECT_EQ(counts.num_collectives() - counts.num_all_gathers() - counts.num_reduce_scatters(), others)
          << "nothing but gathers and reductions, step " << step;
    }
    EXPECT_EQ(collectives[0], collectives[1]);
    EXPECT_EQ(collectives[1], collectives[2]);
    EXPECT_LE(collectives[0], 3 * 48);
  });
}

TEST(CastAfterInit, AdamInDoubleEqualsThePlainProgram) {  // behaviours 6
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    twins.plain->to(torch::kDouble);
    twins.sharded->to(torch::kDouble);
    for (const auto& parameter : twins.q) {
      EXPECT_EQ(DTensor(parameter).to_local().scalar_type(), torch::kDouble);
    }
    expect_same_training(
        twins, {.tolerance = 1e-10,
                .optimizer = all_optimizers()[3].make,
                .backward = [](TestNet& net, const at::Tensor& x) { net.loss(x.to(torch::kDouble)).backward(); }});
  });
}

TEST(MultiGroup, TransformerWithEveryReshardChoice) {
  for (std::optional<bool> reshard : {std::optional<bool>(), std::optional(true), std::optional(false)}) {
    on_two_and_three([&](const RankContext& rank) {
      Twins twins(rank, net_of<Gpt>(3), {.dtype = torch::kDouble, .reshard_after_forward = reshard});
      expect_same_training(twins, {.tolerance = 1e-10, .optimizer = all_optimizers()[3].make});
    });
  }
}

TEST(Foreach, FusedAndForeachOptimizerOpsRunOnShards) {  // behaviours 42
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    twins.backward();
    const torch::NoGradGuard no_grad;
    const auto before = twins.stats();
    const auto update = [](const std::vector<at::Tensor>& w) {
      const auto g = grads(w);
      std::vector<at::Tensor> moments, squares, steps;
      for (const auto& parameter : w) {
        moments.push_back(torch::zeros_like(parameter));
        squares.push_back(torch::zeros_like(parameter));
        steps.push_back(torch::ones({}));
      }
      at::_foreach_add_(w, g, -0.1);
      at::_foreach_mul_(moments, 0.9);
      at::_foreach_lerp_(moments, g, 0.1);
      at::_foreach_addcmul_(squares, g, g, 0.01);
      const auto roots = at::_foreach_sqrt(squares);
      at::_foreach_add_(roots, 1e-8);
      at::_foreach_addcdiv_(w, moments, roots, -0.01);
      at::_fused_adamw_(w, g, moments, squares, {}, steps, 1e-2, 0.9, 0.999, 0.1, 1e-8, false, false);
      at::_fused_adam_(w, g, moments, squares, {}, steps, 1e-2, 0.9, 0.999, 0.0, 1e-8, false, false);
      at::_fused_sgd_(w, g, moments, 0.01, 0.9, 0.1, 0.0, false, false, false);
      at::_foreach_zero_(moments);
    };
    update(twins.p);
    update(twins.q);
    EXPECT_EQ(twins.stats().num_all_gathers, before.num_all_gathers);
    EXPECT_EQ(twins.stats().num_meetings, before.num_meetings);
    EXPECT_SAME_PARAMETERS(twins, 1e-5);
    const auto norms_p = at::_foreach_norm(grads(twins.p)), norms_q = at::_foreach_norm(grads(twins.q));
    for (size_t i = 0; i < norms_p.size(); ++i) {
      EXPECT_NEAR(norms_p[i].item<double>(), norms_q[i].item<double>(), 1e-6);
    }
  });
}

// A forward that takes no input of its own.
TEST(NoInput, ForwardOfParametersOnly) {  // behaviours 2
  on_two_and_three([](const RankContext& rank) {
    struct Child : Vector {
      using Vector::Vector;
      at::Tensor forward() { return w.square().sum(); }
    };
    struct Root : torch::nn::Module {
      Root() { child = register_module("child", std::make_shared<Child>(torch::arange(1, 6, torch::kFloat))); }
      at::Tensor forward() { return child->forward(); }
      std::shared_ptr<Child> child;
    };
    Root net;
    fully_shard(net.child, {.mesh = rank.mesh});
    fully_shard(net, {.mesh = rank.mesh});
    const auto loss = net.forward();
    EXPECT_EQ(loss.item<double>(), 55.0);
    loss.backward();
    EXPECT_LE(difference(2 * torch::arange(1, 6, torch::kFloat), net.child->w.grad()), 0);
  });
}

TEST(Registration, ParametersAreShardedDTensorsAfterBackward) {  // behaviours 4
  for (std::optional<bool> reshard : {std::optional<bool>(), std::optional(true), std::optional(false)}) {
    on_two_and_three([&](const RankContext& rank) {
      Twins twins(rank, net_of<Blocks>(), {.reshard_after_forward = reshard});
      twins.backward();
      const auto named = twins.sharded->named_parameters();
      for (size_t i = 0; i < twins.q.size(); ++i) {
        EXPECT_TRUE(named[i].value().is_same(twins.q[i])) << named[i].key();
        EXPECT_TRUE(DTensor::is(twins.q[i])) << named[i].key();
      }
      EXPECT_EQ(twins.stats().gathered.current, 0);
      EXPECT_SAME_PARAMETERS(twins, 0);
    });
  }
}

TEST(FromGroup, GivesWhatInitDeviceMeshGives) {
  run_on_ranks(4, [](const RankContext& rank) {
    RankContext flat = rank;
    flat.mesh = mesh_2d(rank, 1, 4, "flat")["shard"];
    Twins by_slice(flat, net_of<Mlp>()), by_group(rank, net_of<Mlp>());
    by_slice.backward();
    by_group.backward();
    EXPECT_SAME_GRADS(by_slice, kClose);
    EXPECT_LE(difference(by_group.q[0].grad(), by_slice.q[0].grad()), 0);
  });
}

}  // namespace
}  // namespace fsdp::testing
