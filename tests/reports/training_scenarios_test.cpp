// PyTorch's own scenarios of whole training loops (behaviours T1), with their sizes.
#include "support/parity.h"

namespace fsdp::testing {
namespace {

const std::vector<ReshardAfterForward>& reshard_choices() {
  static const std::vector<ReshardAfterForward> choices{true, false, 2};
  return choices;
}

const OptimizerFactory& adam() {
  static const auto make = all_optimizers()[3].make;
  return make;
}

// A net of its own kind under `options`, in double so that adaptive optimizers may be compared.
Twins sharded_with(const RankContext& rank, const NetFactory& net, FullyShardOptions options) {
  Twins twins(rank, net, {.rows_per_rank = 1, .dtype = torch::kDouble, .shard = false});
  options.mesh = rank.mesh;
  shard_units(*twins.sharded, options);
  return twins;
}

std::vector<FSDPModule> handles_of(TestNet& net) {
  std::vector<FSDPModule> handles;
  for (const auto* unit : net.units()) handles.push_back(FSDPModule::of(*unit));
  return handles;
}

torch::nn::Linear linear_of(TestNet& net, size_t index) {
  return std::dynamic_pointer_cast<torch::nn::LinearImpl>(Twins::as<Mlp>(net).layers->ptr(index));
}

TEST(Scenario, OneWrappedLayerLeavesNothingRunning) {  // behaviours 5
  on_two_and_three([](const RankContext& rank) {
    torch::nn::Linear layer(8, 8);
    fill_parameters(*layer, 1);
    fully_shard(layer, {.mesh = rank.mesh});
    for (int step = 0; step < 3; ++step) {
      const auto y = layer(torch::ones({2, 8}));
      EXPECT_EQ(memory_stats(*layer).buffers.current, 0) << "a gather or reduction flies, step " << step;
      EXPECT_EQ(memory_stats(*layer).num_all_gathers, step + 1);
      y.sum().backward();
      (void)DTensor(layer->weight.grad()).to_local();  // waits for the reduction
      EXPECT_EQ(memory_stats(*layer).gathered.current, 0) << "step " << step;
    }
  });
}

TEST(Scenario, TransformerOfThreeBlocks) {  // behaviours 9
  for (const auto& reshard : reshard_choices()) {
    run_on_ranks(4, [&](const RankContext& rank) {
      auto twins = sharded_with(rank, net_of<Gpt>(3, false, 1024, 16, 4, 64), {.reshard_after_forward = reshard});
      expect_same_training(twins, {.tolerance = 1e-10, .optimizer = adam()});
    });
  }
}

TEST(Scenario, TiedEmbeddingInOneGroupOrAGroupABlock) {  // behaviours 26
  for (const auto& reshard : reshard_choices()) {
    run_on_ranks(4, [&](const RankContext& rank) {
      auto blocks = sharded_with(rank, net_of<Gpt>(2, /*tied=*/true), {.reshard_after_forward = reshard});
      expect_same_training(blocks, {.tolerance = 1e-10});
      Twins one(rank, net_of<Gpt>(2, true), {.rows_per_rank = 1, .dtype = torch::kDouble, .shard = false});
      fully_shard(*one.sharded, {.mesh = rank.mesh, .reshard_after_forward = reshard});
      expect_same_training(one, {.tolerance = 1e-10});
    });
  }
}

TEST(Scenario, AsyncUnshardWithPrefetchLists) {  // behaviours 11
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    auto handles = handles_of(*twins.sharded);  // three layers and the root
    for (int i = 0; i < 3; ++i) {
      handles[i].set_modules_to_forward_prefetch(i < 2 ? std::vector<FSDPModule>{handles[i + 1]}
                                                       : std::vector<FSDPModule>{});
      handles[i].set_modules_to_backward_prefetch(i > 0 ? std::vector<FSDPModule>{handles[i - 1]}
                                                        : std::vector<FSDPModule>{});
    }
    expect_same_training(twins, {.before_step = [&](TestNet& net, int) {
                           if (&net == twins.sharded.get()) (void)handles[0].unshard(/*async_op=*/true);
                         }});
    EXPECT_EQ(twins.stats().gathered.current, 0);
  });
}

TEST(Scenario, ChildForwardInTheMiddleOfTraining) {  // behaviours 12
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    auto p = sgd()(twins.p), q = sgd()(twins.q);
    for (int step = 0; step < 10; ++step) {
      std::vector<at::Tensor> losses;
      twins.both([&](TestNet& net, const at::Tensor& x) {
        net.zero_grad();
        losses.push_back(net.loss(x));
        losses.back().backward();
        losses.push_back(linear_of(net, 0)(x).square().mean());
        losses.back().backward();
      });
      p->step();
      q->step();
      for (int i : {0, 1})
        EXPECT_NEAR(losses[i].item<double>(), mean_over_ranks(losses[2 + i], rank.group), 1e-5) << step << ", " << i;
      twins.next_batch();
    }
    EXPECT_SAME_PARAMETERS(twins, 1e-5);
  });
}

// 3 microbatches, of which only some use the second chunk of the group.
TEST(Scenario, AccumulationOverAGroupOfWhichAPartRuns) {  // behaviours 19
  on_two_and_three([](const RankContext& rank) {
    for (int with_second = 0; with_second < 3; ++with_second) {
      Twins twins(rank, square_mlp(), {.shard = false});
      auto& layers = *Twins::as<Mlp>(*twins.sharded).layers;
      auto chunks = fully_shard({layers.ptr(0), layers.ptr(2)}, {.mesh = rank.mesh});
      for (int i = 0; i < 3; ++i) {
        twins.next_batch();
        chunks.set_requires_gradient_sync(i == 2);
        twins.both([&](TestNet& net, const at::Tensor& x) {
          const auto h = linear_of(net, 0)(x);
          (i == with_second ? linear_of(net, 2)(h) : h).square().mean().backward();
        });
      }
      for (int i : {0, 1, 2, 3}) EXPECT_LE(difference(twins.p[i].grad(), twins.q[i].grad()), kClose) << with_second;
    }
  });
}

TEST(Scenario, ReshardToggledBetweenIterations) {  // behaviours 20
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Blocks>());
    auto root = FSDPModule::of(*twins.sharded);
    std::vector<int64_t> kept;  // bytes, after forward
    for (const bool reshard : {false, true, false, true}) {
      root.set_reshard_after_forward(reshard);
      const auto p = twins.plain->loss(twins.joined), q = twins.sharded->loss(twins.part);
      kept.push_back(twins.stats().gathered.current);
      for (const auto& parameter : twins.q) EXPECT_TRUE(DTensor::is(parameter));
      p.backward();
      q.backward();
      EXPECT_SAME_GRADS(twins, kClose);
      twins.zero_grad();
    }
    EXPECT_GT(kept[0], kept[1]) << "all four blocks, and at most two of them";
    EXPECT_EQ(kept[0], kept[2]);
    EXPECT_EQ(kept[1], kept[3]);
  });
}

TEST(Scenario, HeadSkippedByTheFirstOrBySecondForward) {  // behaviours 23
  on_two_and_three([](const RankContext& rank) {
    for (const bool skips_first : {true, false}) {
      Twins twins(rank, square_mlp());
      for (const bool skips : {skips_first, !skips_first}) {
        twins.both([&](TestNet& net, const at::Tensor& x) {
          const auto body = linear_of(net, 2)(linear_of(net, 0)(x).relu()).tanh();
          (skips ? body : linear_of(net, 4)(body)).square().mean().backward();
        });
        EXPECT_EQ(twins.q[4].grad().defined(), !skips);
        EXPECT_SAME_GRADS(twins, kClose) << "skips " << skips;
        twins.zero_grad();
      }
    }
  });
}

TEST(Scenario, MicrobatchesOfAPipelineStage) {  // behaviours 31
  on_two_and_three([](const RankContext& rank) {
    for (const bool unshards_first : {false, true}) {
      for (const bool reshards_after_backward : {false, true}) {
        Twins twins(rank, net_of<Gpt>(2, false, 8, 16, 4, 16),
                    {.rows_per_rank = 2, .dtype = torch::kDouble, .reshard_after_forward = false});
        auto p = all_optimizers()[5].make(twins.p), q = all_optimizers()[5].make(twins.q);
        auto handles = handles_of(*twins.sharded);
        auto& root = handles.back();
        for (int step = 0; step < 2; ++step) {
          if (unshards_first)
            for (auto& handle : handles) (void)handle.unshard(/*async_op=*/true);
          for (int i = 0; i < 3; ++i) {
            root.set_reshard_after_backward(reshards_after_backward);
            root.set_is_last_backward(i == 2);
            root.set_requires_gradient_sync(i == 2);
            std::vector<at::Tensor> losses;
            twins.both([&](TestNet& net, const at::Tensor& x) {
              losses.push_back(net.loss(x));
              losses.back().backward();
            });
            EXPECT_NEAR(losses[0].item<double>(), mean_over_ranks(losses[1], rank.group), 1e-10) << step << ", " << i;
            twins.next_batch();
          }
          p->step();
          q->step();
          EXPECT_LE(own_difference(twins.p, twins.q), 1e-10);
          twins.zero_grad();
        }
      }
    }
  });
}

}  // namespace
}  // namespace fsdp::testing
