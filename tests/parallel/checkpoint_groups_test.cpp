// checkpoint() over the ways in which PyTorch's own tests cut a Transformer into groups. Counts are upper bounds: this
// library gathers where a value is read (docs/fsdp2_differences.md).
#include <c10/util/StringUtil.h>
#include <fsdp/activation_checkpoint.h>
#include <fsdp/call.h>

#include "support/parity.h"
#include "support/ranges.h"

namespace fsdp::testing {
namespace {

TEST(CheckpointedGpt, TrainsAlikeAlsoWithTiedWeights) {  // behaviours 16
  for (const auto& reshard : {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(2)}) {
    run_on_ranks(4, [&](const RankContext& rank) {
      for (const bool tied : {false, true}) {
        Twins twins(rank, net_of<Gpt>(3, tied), {.rows_per_rank = 1, .dtype = torch::kDouble, .shard = false});
        auto& net = Twins::as<Gpt>(*twins.sharded);
        net.checkpoint_blocks = true;
        const FullyShardOptions options{.mesh = rank.mesh, .reshard_after_forward = reshard};
        if (tied) fully_shard(net.token, options).set_unshard_in_backward(false);
        shard_units(net, options);
        expect_same_training(twins, {.num_steps = 5, .tolerance = 1e-10, .optimizer = all_optimizers()[3].make});
      }
    });
  }
}

at::Tensor through_blocks(Blocks& net, const at::Tensor& x, bool with_checkpoint) {
  auto h = net.in(x);
  for (const auto& block : net.blocks) h = with_checkpoint ? checkpoint(block, h) : block->forward(h);
  return net.out(h);
}

TEST(CheckpointedBlocks, TwoForwardsInOneLossOfPreferences) {  // behaviours 22
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Blocks>(Blocks::Kind::kNestedInner, 3));
    for (int step = 0; step < 3; ++step) {
      twins.both([&](TestNet& net, const at::Tensor& x) {
        auto& blocks = Twins::as<Blocks>(net);
        const bool with = &net == twins.sharded.get();
        const auto chosen = through_blocks(blocks, x, with).sum(1);
        const auto rejected = through_blocks(blocks, x * -0.5, with).sum(1);
        (-at::log_sigmoid(chosen - rejected)).mean().backward();
      });
      EXPECT_SAME_GRADS(twins, kClose) << "step " << step;
      twins.zero_grad();
    }
  });
}

TEST(CheckpointedBlocks, ForwardPrefetchOneAndTwoAhead) {  // behaviours 54
  const Ranges ranges;
  for (const size_t ahead : {1, 2}) {
    on_two_and_three([&](const RankContext& rank) {
      Twins twins(rank, net_of<Blocks>(), {.reshard_after_forward = true});
      auto& net = Twins::as<Blocks>(*twins.sharded);
      std::vector<FSDPModule> layers;
      for (const auto& block : net.blocks) layers.push_back(FSDPModule::of(*block));
      for (size_t i = 0; i < layers.size(); ++i) {
        const auto end = std::min(layers.size(), i + 1 + ahead);
        layers[i].set_modules_to_forward_prefetch({layers.begin() + i + 1, layers.begin() + end});
      }
      for (int step = 0; step < 3; ++step) {
        Ranges::forget_this_thread();
        const auto loss = through_blocks(net, twins.part, true).square().mean();
        EXPECT_EQ(Ranges::of_this_thread("FSDP::all_gather "),
                  (std::vector<std::string>{"(in.weight and 3 more)", "(block0.first.weight and 5 more)",
                                            "(block1.first.weight and 5 more)", "(block2.first.weight and 5 more)",
                                            "(block3.first.weight and 5 more)"}))
            << ahead << " ahead, step " << step;
        Ranges::forget_this_thread();
        loss.backward();
        EXPECT_LE(Ranges::of_this_thread("FSDP::all_gather ").size(), 5U) << ahead << " ahead, step " << step;
        twins.plain->loss(twins.joined).backward();
        EXPECT_SAME_GRADS(twins, kClose) << ahead << " ahead, step " << step;
        EXPECT_EQ(twins.stats().gathered.current, 0);
        twins.zero_grad();
      }
    });
  }
}

TEST(CheckpointedGpt, InGroupsOfSeveralModules) {  // behaviours 57
  const Ranges ranges;
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Gpt>(5), {.rows_per_rank = 1, .dtype = torch::kDouble, .shard = false});
    auto& net = Twins::as<Gpt>(*twins.sharded);
    net.checkpoint_blocks = true;
    const FullyShardOptions options{.mesh = rank.mesh, .reshard_after_forward = true};
    fully_shard({net.token.ptr(), net.position.ptr()}, options);
    fully_shard(*net.blocks->ptr(0), options);
    fully_shard({net.blocks->ptr(1), net.blocks->ptr(2)}, options);
    fully_shard({net.blocks->ptr(3), net.blocks->ptr(4)}, options);
    fully_shard({net.norm.ptr(), net.head.ptr()}, {.mesh = rank.mesh, .reshard_after_forward = false});
    fully_shard(net, options);
    const auto optimizer_p = all_optimizers()[5].make(twins.p), optimizer_q = all_optimizers()[5].make(twins.q);
    using Names = std::vector<std::string>;
    for (int step = 0; step < 3; ++step) {
      Ranges::forget_this_thread();
      const auto loss = twins.sharded->loss(twins.part);
      EXPECT_EQ(Ranges::of_this_thread("FSDP::all_gather "),
                (Names{"(token.weight and 1 more)", "(blocks.0.norm1.weight and 7 more)",
                       "(blocks.1.norm1.weight and 15 more)", "(blocks.3.norm1.weight and 15 more)",
                       "(norm.weight and 2 more)"}))
          << "step " << step;
      loss.backward();
      EXPECT_EQ(Ranges::of_this_thread("FSDP::reduce_scatter "),
                (Names{"(norm.weight and 2 more)", "(blocks.3.norm1.weight and 15 more)",
                       "(blocks.1.norm1.weight and 15 more)", "(blocks.0.norm1.weight and 7 more)",
                       "(token.weight and 1 more)"}))
          << "step " << step;
      const auto expected = twins.plain->loss(twins.joined);
      expected.backward();
      EXPECT_NEAR(expected.item<double>(), mean_over_ranks(loss, rank.group), 1e-10) << "step " << step;
      EXPECT_LE(own_difference(grads(twins.p), grads(twins.q)), 1e-10);
      optimizer_p->step();
      optimizer_q->step();
      EXPECT_LE(own_difference(twins.p, twins.q), 1e-10);
      twins.zero_grad();
    }
  });
}

struct RecordedLayer : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const auto y = linear(x);
    seen.push_back(x.scalar_type());
    seen.push_back(y.scalar_type());
    return y.exp();
  }
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(8, 8));
  std::vector<at::ScalarType> seen;
};

TEST(CheckpointedCall, CastsInBothRuns) {  // behaviours 78
  run_on_ranks(2, [](const RankContext& rank) {
    using Dtypes = std::vector<at::ScalarType>;
    std::vector<std::vector<at::Tensor>> results;
    for (const bool with_checkpoint : {false, true}) {
      const auto layer = std::make_shared<RecordedLayer>();
      fill_parameters(*layer, 1);
      fully_shard(
          layer, {.mesh = rank.mesh,
                  .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat, .output_dtype = at::kFloat}});
      Dtypes outputs;
      const auto run = [layer, &outputs](const at::Tensor& x) {
        const auto y = fsdp::call(*layer, x);
        outputs.push_back(y.scalar_type());
        return y;
      };
      const auto x = torch::empty({4, 8}).normal_(0, 1, seeded(rank.rank()));
      (with_checkpoint ? checkpoint({.early_stop = false}, run, x) : run(x)).square().mean().backward();
      EXPECT_EQ(layer->seen, Dtypes(with_checkpoint ? 4 : 2, at::kBFloat16));
      EXPECT_EQ(outputs, Dtypes(with_checkpoint ? 2 : 1, at::kFloat));
      results.push_back(grads(layer->parameters()));
    }
    EXPECT_LE(difference(results[0], results[1]), 0);
  });
}

}  // namespace
}  // namespace fsdp::testing
