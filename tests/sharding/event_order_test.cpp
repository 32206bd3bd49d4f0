// PyTorch's scenarios about the order and number of gathers and reductions. Counts are upper bounds: this library
// gathers where a value is read (docs/fsdp2_differences.md).
#include "support/parity.h"

namespace fsdp::testing {
namespace {

struct Issued {
  int64_t gathers = 0, reductions = 0;
};

Issued issued_by(const torch::nn::Module& module, const std::function<void()>& action) {
  const auto before = memory_stats(module);
  action();
  const auto after = memory_stats(module);
  return {after.num_all_gathers - before.num_all_gathers, after.num_reduce_scatters - before.num_reduce_scatters};
}

TEST(Events, ReshardByHandBetweenForwardAndBackward) {  // behaviours 47
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Blocks>(Blocks::Kind::kPlain, 3), {.reshard_after_forward = false});
    const int64_t num_modules = 4;
    at::Tensor loss;
    const auto forward = issued_by(*twins.sharded, [&] { loss = twins.sharded->loss(twins.part); });
    EXPECT_EQ(forward.gathers, num_modules);
    for (const auto* unit : twins.sharded->units()) FSDPModule::of(*unit).reshard();
    EXPECT_EQ(twins.stats().gathered.current, 0);
    const auto backward = issued_by(*twins.sharded, [&] { loss.backward(); });
    EXPECT_LE(backward.gathers, num_modules);
    EXPECT_EQ(backward.reductions, num_modules);
    twins.plain->loss(twins.joined).backward();
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

struct ReshardSetting {
  const char* name;
  std::optional<bool> built;
  std::optional<bool> set;
  bool recurse;
  int64_t most_in_backward;
};

TEST(Events, ReshardAfterForwardSetOnTheRoot) {  // behaviours 50
  constexpr int64_t kBlocks = 4;
  for (const auto& setting :
       {ReshardSetting{"untouched", std::nullopt, std::nullopt, true, kBlocks},
        ReshardSetting{"true", false, true, true, kBlocks + 1},
        ReshardSetting{"true, the root alone", false, true, false, 1}, ReshardSetting{"false", true, false, true, 0},
        ReshardSetting{"false, the root alone", true, false, false, kBlocks}}) {
    run_on_ranks(2, [&](const RankContext& rank) {
      Twins twins(rank, net_of<Blocks>(), {.reshard_after_forward = setting.built});
      if (setting.set) FSDPModule::of(*twins.sharded).set_reshard_after_forward(*setting.set, setting.recurse);
      for (int step = 0; step < 2; ++step) {
        at::Tensor loss;
        const auto forward = issued_by(*twins.sharded, [&] { loss = twins.sharded->loss(twins.part); });
        const auto backward = issued_by(*twins.sharded, [&] { loss.backward(); });
        EXPECT_EQ(forward.gathers, kBlocks + 1) << setting.name << ", step " << step;
        EXPECT_LE(backward.gathers, setting.most_in_backward) << setting.name << ", step " << step;
        EXPECT_EQ(backward.reductions, kBlocks + 1) << setting.name << ", step " << step;
        twins.plain->loss(twins.joined).backward();
        EXPECT_SAME_GRADS(twins, kClose) << setting.name;
        twins.zero_grad();
      }
    });
  }
}

struct TwoForwards {
  std::optional<bool> reshard;
  int64_t most_in_forward, most_in_backward;
};

TEST(Events, TwoForwardsBeforeOneBackward) {  // behaviours 52
  for (const auto& test : {TwoForwards{std::nullopt, 7, 6}, TwoForwards{std::optional(true), 8, 7},
                           TwoForwards{std::optional(false), 4, 3}}) {
    on_two_and_three([&](const RankContext& rank) {
      Twins twins(rank, net_of<Gpt>(3), {.rows_per_rank = 1, .reshard_after_forward = test.reshard});
      for (int step = 0; step < 3; ++step) {
        const auto both_losses = [](TestNet& net, const at::Tensor& x) { return net.loss(x) + net.loss(x.flip(1)); };
        at::Tensor loss;
        const auto forward = issued_by(*twins.sharded, [&] { loss = both_losses(*twins.sharded, twins.part); });
        const auto backward = issued_by(*twins.sharded, [&] { loss.backward(); });
        EXPECT_LE(forward.gathers, test.most_in_forward) << "step " << step;
        EXPECT_LE(backward.gathers, test.most_in_backward) << "step " << step;
        EXPECT_EQ(backward.reductions, 4) << "one a group, though each was used twice";
        const auto expected = both_losses(*twins.plain, twins.joined);
        expected.backward();
        EXPECT_NEAR(expected.item<double>(), mean_over_ranks(loss, rank.group), 1e-5) << "step " << step;
        EXPECT_SAME_GRADS(twins, kClose) << "step " << step;
        twins.zero_grad();
      }
    });
  }
}

// first - (lin1, lin2): two outputs.
class TwoOutputs : public TestNet {
 public:
  TwoOutputs() {
    first = register_module("first", torch::nn::Linear(8, 8));
    lin1 = register_module("lin1", torch::nn::Linear(8, 8));
    lin2 = register_module("lin2", torch::nn::Linear(8, 8));
  }
  std::pair<at::Tensor, at::Tensor> losses(const at::Tensor& x) {
    const auto h = first(x);
    return {lin1(h).square().mean(), lin2(h).square().mean()};
  }
  at::Tensor forward(const at::Tensor& x) override { return losses(x).first; }
  std::vector<torch::nn::Module*> units() override { return {first.get(), lin1.get(), lin2.get(), this}; }
  at::Tensor batch(int64_t batch_size, at::Generator generator) const override {
    return torch::empty({batch_size, 8}).normal_(0, 1, generator);
  }
  torch::nn::Linear first{nullptr}, lin1{nullptr}, lin2{nullptr};
};

TEST(Events, GuessOfWhatBackwardUsesIsWrong) {  // behaviours 53
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<TwoOutputs>(), {.reshard_after_forward = true});
    auto root = FSDPModule::of(*twins.sharded);
    for (int step = 0; step < 3; ++step) {
      std::pair<at::Tensor, at::Tensor> losses;
      const auto forward =
          issued_by(*twins.sharded, [&] { losses = Twins::as<TwoOutputs>(*twins.sharded).losses(twins.part); });
      root.set_is_last_backward(false);
      const auto second = issued_by(*twins.sharded, [&] { losses.second.backward({}, /*retain_graph=*/true); });
      root.set_is_last_backward(true);
      const auto first = issued_by(*twins.sharded, [&] { losses.first.backward(); });
      EXPECT_LE(forward.gathers, 3) << "step " << step;
      EXPECT_LE(second.gathers, 3) << "step " << step;
      EXPECT_LE(first.gathers, 1) << "step " << step;
      EXPECT_EQ(second.reductions + first.reductions, 4) << "first twice, lin1 and lin2 once";
      EXPECT_EQ(twins.stats().gathered.current, 0);
      const auto plain = Twins::as<TwoOutputs>(*twins.plain).losses(twins.joined);
      plain.second.backward({}, /*retain_graph=*/true);
      plain.first.backward();
      EXPECT_SAME_GRADS(twins, kClose) << "step " << step;
      twins.zero_grad();
    }
  });
}

// Gathers that were only started, between collectives of the user on the same group.
TEST(Events, AsyncUnshardBetweenCollectivesOfTheUser) {  // behaviours 60
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    auto p = sgd()(twins.p), q = sgd()(twins.q);
    const auto mean_of_all = [&](TestNet& net, const at::Tensor& h) {
      auto mean = h.detach().mean(0);
      if (&net == twins.plain.get()) return mean;
      std::vector<at::Tensor> sum{mean};
      rank.group->allreduce(sum)->wait();
      return sum[0] / rank.size();
    };
    for (int step = 0; step < 10; ++step) {
      std::vector<at::Tensor> losses;
      twins.both([&](TestNet& net, const at::Tensor& x) {
        auto& layers = *Twins::as<Mlp>(net).layers;
        if (&net == twins.sharded.get())
          for (int i : {0, 2, 4}) (void)FSDPModule::of(*layers.ptr(i)).unshard(/*async_op=*/true);
        auto h = x;
        for (int i : {0, 2, 4}) h = layers.ptr(i)->as<torch::nn::Linear>()->forward(h - 0.5 * mean_of_all(net, h));
        losses.push_back(h.square().mean());
        losses.back().backward();
      });
      EXPECT_NEAR(losses[0].item<double>(), mean_over_ranks(losses[1], rank.group), 1e-5) << "step " << step;
      EXPECT_SAME_GRADS(twins, 1e-5);
      p->step();
      q->step();
      twins.zero_grad();
      twins.next_batch();
    }
  });
}

}  // namespace
}  // namespace fsdp::testing
