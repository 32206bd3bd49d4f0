// What FSDPModule says about gradients: when they are reduced, over whom, and what they are divided by.
#include "support/parity.h"

namespace fsdp::testing {
namespace {

// Gradients of three microbatches of both nets; only the last one of the sharded net is synced.
void three_microbatches(Twins& twins, const std::function<void(bool last)>& before) {
  for (int i = 0; i < 3; ++i) {
    twins.next_batch();
    before(i == 2);
    twins.backward();
    if (i == 2) continue;
    for (const auto& parameter : twins.q) EXPECT_FALSE(parameter.grad().defined()) << "microbatch " << i;
  }
}

TEST(GradientSync, AutogradGradWithoutItIsRefused) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    FSDPModule::of(*twins.sharded).set_requires_gradient_sync(false);
    const auto loss = twins.sharded->loss(twins.part);
    EXPECT_CONTAINS(error_of<c10::NotImplementedError>([&] { (void)torch::autograd::grad({loss}, {twins.q[0]}); }),
                    "autograd::grad of 'layers.0.weight' while set_requires_gradient_sync(false)");
  });
}

TEST(GradientSync, OnlyWithTheLastMicrobatch) {
  for (const int size : {1, 2, 3, 4}) {
    run_on_ranks(size, [](const RankContext& rank) {
      Twins twins(rank, net_of<Mlp>());
      auto root = FSDPModule::of(*twins.sharded);
      const auto before = twins.stats().num_reduce_scatters;
      three_microbatches(twins, [&](bool last) { root.set_requires_gradient_sync(last); });
      EXPECT_SAME_GRADS(twins, kClose);
      const auto reductions = twins.stats().num_reduce_scatters - before;
      EXPECT_EQ(reductions, rank.size() == 1 ? 0 : 3) << "one a group";
    });
  }
}

TEST(GradientSync, GroupThatTheLastBackwardDoesNotReach) {  // behaviours 19, 110
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    auto root = FSDPModule::of(*twins.sharded);
    root.set_requires_gradient_sync(false);
    twins.backward();
    root.set_requires_gradient_sync(true);
    twins.both([](TestNet& net, const at::Tensor& x) {  // the first layer only
      Twins::as<Mlp>(net).layers->ptr(0)->as<torch::nn::Linear>()->forward(x).square().mean().backward();
    });
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

TEST(GradientSync, AddsToGradientsThatAreThere) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    twins.backward();
    auto root = FSDPModule::of(*twins.sharded);
    root.set_requires_gradient_sync(false);
    twins.backward();
    root.set_requires_gradient_sync(true);
    twins.backward();
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

TEST(AllReduce, OnlyWithTheLastMicrobatchOnReplicas) {
  run_on_ranks(4, [](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>(), {.shard = false});
    shard_units(*twins.sharded, mesh_2d(rank, 2, 2, "hsdp"));
    auto root = FSDPModule::of(*twins.sharded);
    three_microbatches(twins, [&](bool last) { root.set_requires_all_reduce(last); });
    EXPECT_SAME_GRADS(twins, kClose);
    twins.zero_grad();
    expect_same_training(twins, {.num_steps = 3});
  });
}

TEST(AllReduce, UnusedParametersStayWithoutGradient) {
  run_on_ranks(4, [](const RankContext& rank) {
    Twins twins(rank, square_mlp(), {.shard = false});
    auto root = fully_shard(*twins.sharded, {.mesh = mesh_2d(rank, 2, 2, "unused")});
    for (const bool all_reduces : {false, true}) {
      root.set_requires_all_reduce(all_reduces);
      twins.both([](TestNet& net, const at::Tensor& x) {  // the first layer only
        Twins::as<Mlp>(net).layers->ptr(0)->as<torch::nn::Linear>()->forward(x).square().mean().backward();
      });
    }
    EXPECT_SAME_GRADS(twins, kClose);
    EXPECT_FALSE(twins.q[4].grad().defined());
  });
}

TEST(GradientSync, AGraphWhoseBackwardFailedIsNotUsedAgain) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    auto root = FSDPModule::of(*twins.sharded);
    root.set_requires_gradient_sync(false);
    auto x = twins.part.clone().requires_grad_();
    bool fails = true;
    x.register_hook([&fails](const at::Tensor& grad) -> at::Tensor {
      if (fails) throw std::runtime_error("boom");
      return grad;
    });
    const auto loss = twins.sharded->loss(x);
    EXPECT_THROW(loss.backward({}, /*retain_graph=*/true), std::runtime_error);
    fails = false;
    root.reset_iter_state();
    root.set_requires_gradient_sync(true);
    EXPECT_CONTAINS(error_of([&] { loss.backward(); }), "run the forward again");
    root.reset_iter_state();
    twins.backward();
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

TEST(ResetIterState, WhenAReductionFailed) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    auto root = FSDPModule::of(*twins.sharded);
    auto& last = *Twins::as<Mlp>(*twins.sharded).layers->ptr(4)->as<torch::nn::Linear>();
    torch::linear(torch::ones({2, last.weight.size(1)}), last.weight, rank.rank() == 0 ? last.bias : at::Tensor())
        .sum()
        .backward();
    root.reset_iter_state();
    EXPECT_EQ(twins.stats().gathered.current, 0);
    twins.zero_grad();
    expect_same_training(twins, {.num_steps = 2});
  });
}

TEST(DivideFactor, MeansTheSameOnEveryMesh) {  // behaviours 48
  for (const int rows : {1, 2, 4}) {
    run_on_ranks(4, [rows](const RankContext& rank) {
      Twins twins(rank, square_mlp(), {.shard = false});
      const auto mesh = rows == 1 ? rank.mesh : mesh_2d(rank, rows, 4 / rows, "factor");
      shard_units(*twins.sharded, mesh);
      auto layer = FSDPModule::of(*Twins::as<Mlp>(*twins.sharded).layers->ptr(0));
      layer.set_gradient_divide_factor(8);  // twice the number of ranks: half the mean
      twins.backward();
      for (int i : {0, 1}) twins.p[i].mutable_grad().div_(2);
      EXPECT_SAME_GRADS(twins, kClose);
      for (const double wrong : {0.0, -1.0, std::numeric_limits<double>::infinity()})
        EXPECT_CONTAINS(error_of<c10::ValueError>([&] { layer.set_gradient_divide_factor(wrong); }), "positive");
    });
  }
}

TEST(DivideFactor, KeepsHalfPrecisionSumsInRange) {  // behaviours 45
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::Module net;
    net.register_parameter("weight", torch::ones({4}));
    fully_shard(net, {.mesh = rank.mesh, .mp_policy = {.reduce_dtype = at::kHalf}});
    (net.parameters()[0] * 60000).sum().backward();  // the sum over two ranks is beyond fp16
    EXPECT_LE(difference(torch::full({4}, 60000.0), net.parameters()[0].grad()), 1e-3);
  });
}

TEST(ReduceDtype, RoundsTheReductionAlone) {  // behaviours 71
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp(), {.shard = false});
    for (auto* unit : twins.sharded->units())
      fully_shard(*unit, {.mesh = rank.mesh, .mp_policy = {.reduce_dtype = at::kBFloat16}});
    twins.backward();
    const auto far = twins.grad_difference();
    EXPECT_GT(far, kClose) << "it was rounded";
    EXPECT_LE(far, 2e-2);
    for (const auto& parameter : twins.q) EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
  });
}

TEST(UnusedParams, CountAsZerosWhereAsked) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    auto root = FSDPModule::of(*twins.sharded);
    root.set_reduce_scatter_unused_params(true);
    // Only rank 0 uses the bias of the last layer; the layer's weight is used by all.
    const auto loss = [](TestNet& net, const at::Tensor& x, bool with_bias) {
      auto& last = *Twins::as<Mlp>(net).layers->ptr(4)->as<torch::nn::Linear>();
      const auto h = torch::ones({x.size(0), last.weight.size(1)});
      return torch::linear(h, last.weight, with_bias ? last.bias : at::Tensor()).square().mean();
    };
    loss(*twins.sharded, twins.part, rank.rank() == 0).backward();
    for (int r = 0; r < rank.size(); ++r) (loss(*twins.plain, twins.part, r == 0) / rank.size()).backward();
    EXPECT_LE(difference(twins.p[4].grad(), twins.q[4].grad()), kClose);
    EXPECT_LE(difference(twins.p[5].grad(), twins.q[5].grad()), kClose);
  });
}

TEST(UnusedParams, AreAnErrorOtherwise) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    auto& last = *Twins::as<Mlp>(*twins.sharded).layers->ptr(4)->as<torch::nn::Linear>();
    const auto h = torch::ones({2, last.weight.size(1)});
    const auto message = error_of([&] {
      torch::linear(h, last.weight, rank.rank() == 0 ? last.bias : at::Tensor()).sum().backward();
      (void)last.weight.grad().to(at::kDouble);  // reads
    });
    EXPECT_CONTAINS(message, "layers.4.bias");
    EXPECT_CONTAINS(message, "set_reduce_scatter_unused_params");
  });
}

TEST(AllReduceHook, SeesTheSumBeforeTheDivision) {
  run_on_ranks(4, [](const RankContext& rank) {
    for (const bool replicas : {false, true}) {
      Twins twins(rank, square_mlp(), {.shard = false});
      shard_units(*twins.sharded, replicas ? mesh_2d(rank, 2, 2, "hook") : rank.mesh);
      int num_calls = 0;
      for (auto* unit : twins.sharded->units()) {
        if (unit == twins.sharded.get()) continue;
        FSDPModule::of(*unit).set_all_reduce_hook([&](const at::Tensor& sum) {
          ++num_calls;
          sum.mul_(3);
        });
      }
      twins.backward();
      for (const auto& parameter : twins.p) parameter.mutable_grad().mul_(3);
      EXPECT_SAME_GRADS(twins, kClose);
      EXPECT_EQ(num_calls, 3);
    }
  });
}

struct CountCalls : torch::autograd::PostAccumulateGradHook {
  explicit CountCalls(int& num_calls) : num_calls(num_calls) {}
  void operator()(const Variable&) override { ++num_calls; }
  int& num_calls;
};

TEST(Hooks, PostAccumulateRunsForSyncedBackwardsOnly) {  // behaviours 115
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    int num_calls = 0;
    torch::autograd::impl::set_post_acc_grad_hooks(twins.q[0], std::make_unique<CountCalls>(num_calls));
    auto root = FSDPModule::of(*twins.sharded);
    root.set_requires_gradient_sync(false);
    twins.backward();
    EXPECT_EQ(num_calls, 0);
    root.set_requires_gradient_sync(true);
    twins.backward();
    EXPECT_EQ(num_calls, 1);
  });
}

TEST(MaxInputBuffers, ChangeNoValues) {  // behaviours 49
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    auto root = FSDPModule::of(*twins.sharded);
    EXPECT_CONTAINS(error_of<c10::ValueError>([&] { root.set_reduce_scatter_max_input_buffers(0); }), "at least 1");
    root.set_reduce_scatter_max_input_buffers(2);
    expect_same_training(twins, {.num_steps = 3});
  });
}

// What flies while backward computes, which shows in the bytes of reductions that nobody has waited for.
TEST(MaxInputBuffers, HoldAsSetLastAndForOneModuleAlone) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, net_of<Blocks>(), {.reshard_after_forward = false});  // no gathers in backward
    auto root = FSDPModule::of(*twins.sharded);
    auto block = FSDPModule::of(*Twins::as<Blocks>(*twins.sharded).blocks[1]);
    const auto peak = [&] {
      const auto loss = twins.sharded->loss(twins.part);
      reset_peak_memory_stats(*twins.sharded);
      loss.backward();
      const auto most = twins.stats().buffers.peak;
      for (const auto& parameter : twins.q) (void)DTensor(parameter.grad()).to_local();
      twins.zero_grad();
      return most;
    };
    const auto one = peak();
    root.set_reduce_scatter_max_input_buffers(4);
    EXPECT_GT(peak(), one);
    root.set_reduce_scatter_max_input_buffers(1);
    EXPECT_EQ(peak(), one);
    block.set_reduce_scatter_max_input_buffers(4, /*recurse=*/false);
    root.set_reduce_scatter_max_input_buffers(1, /*recurse=*/false);
    EXPECT_GT(peak(), one) << "the largest of all modules counts";
  });
}

// Autograd gives both parameters one tensor.
TEST(OneRank, GradientsOfASumShareNoMemory) {
  run_on_ranks(1, [](const RankContext& rank) {
    struct Net : torch::nn::Module {
      at::Tensor first = register_parameter("first", torch::ones({3})),
                 second = register_parameter("second", torch::ones({3}));
    } plain, sharded;
    fully_shard(sharded, {.mesh = rank.mesh});
    const auto x = torch::tensor({3.0F, 4.0F, 1.0F});
    for (auto* net : {&plain, &sharded}) {
      for (int i = 0; i < 2; ++i) ((net->first + net->second) * x).sum().backward();
      torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
    }
    EXPECT_LE(difference(grads(plain.parameters()), grads(sharded.parameters())), kClose);
  });
}

TEST(SecondDerivatives, GradientPenalty) {
  for (const int size : {1, 2, 3, 4}) {
    run_on_ranks(size, [](const RankContext& rank) {
      Twins twins(rank, net_of<Mlp>(), {.dtype = at::kDouble});
      twins.both([](TestNet& net, const at::Tensor& x) {
        const auto loss = net.loss(x);
        const auto grads = torch::autograd::grad({loss}, net.parameters(), {}, true, /*create_graph=*/true);
        auto penalty = torch::zeros({}, at::kDouble);
        for (const auto& grad : grads) penalty = penalty + grad.square().sum();
        (loss + 0.3 * penalty).backward();
      });
      EXPECT_SAME_GRADS(twins, 1e-10);
    });
  }
}

TEST(SecondDerivatives, ThirdOnesAreRefused) {
  for (const int size : {1, 2}) {
    run_on_ranks(size, [](const RankContext& rank) {
      Twins twins(rank, net_of<Mlp>());
      const auto parameters = twins.sharded->parameters();
      const auto grads = torch::autograd::grad({twins.sharded->loss(twins.part)}, parameters, {}, true, true);
      const auto penalty = grads[0].square().sum();
      EXPECT_CONTAINS(error_of<c10::NotImplementedError>(
                          [&] { (void)torch::autograd::grad({penalty}, parameters, {}, true, true, true); }),
                      "third");
    });
  }
}

TEST(SecondDerivatives, BackwardWithCreateGraph) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>(), {.dtype = at::kDouble});
    std::vector<at::Tensor> results;
    twins.both([&](TestNet& net, const at::Tensor& x) {
      net.loss(x).backward({}, true, /*create_graph=*/true);
      const auto first = net.parameters()[0].grad();
      net.zero_grad();
      first.square().sum().backward();
    });
    EXPECT_SAME_GRADS(twins, 1e-10);
    twins.zero_grad();
    expect_same_training(twins, {.num_steps = 2});
  });
}

}  // namespace
}  // namespace fsdp::testing
