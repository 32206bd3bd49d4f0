// How many collectives a training step makes, and how many bytes it holds.
#include "support/parity.h"

namespace fsdp::testing {
namespace {

struct Collectives {
  int64_t all_gathers = 0, reduce_scatters = 0, meetings = 0;
};

Collectives collectives_of(Twins& twins, const std::function<void()>& action) {
  const auto before = twins.stats();
  action();
  const auto after = twins.stats();
  return {after.num_all_gathers - before.num_all_gathers, after.num_reduce_scatters - before.num_reduce_scatters,
          after.num_meetings - before.num_meetings};
}

struct CountCase {
  const char* name;
  NetFactory net;
  int64_t most_all_gathers, most_reduce_scatters;
  std::function<void(TestNet&, const at::Tensor&)> backward = [](TestNet& net, const at::Tensor& x) {
    net.loss(x).backward();
  };
};

std::vector<CountCase> count_cases() {
  using Kind = Blocks::Kind;
  return {
      {"FourBlocksAndRoot", net_of<Blocks>(Kind::kPlain), 8, 5},
      {"NestedInner", net_of<Blocks>(Kind::kNestedInner), 15, 9},
      {"RootParameterInBlock", net_of<Blocks>(Kind::kRootInBlock), 7, 5},
      {"SiblingGroup", net_of<Blocks>(Kind::kSiblingGroup), 12, 6},
      {"ThreeGroupsAppliedTwice", net_of<Mlp>(8, 16, 16, 8), 9, 3,
       [](TestNet& net, const at::Tensor& x) { net.forward(net.forward(x)).square().mean().backward(); }},
  };
}

class Counts : public ::testing::TestWithParam<size_t> {};

TEST_P(Counts, StayWithinTheirBoundOnEveryStep) {
  const auto test = count_cases()[GetParam()];
  run_on_ranks(2, [&](const RankContext& rank) {
    Twins twins(rank, test.net);
    auto optimizer_p = sgd()(twins.p), optimizer_q = sgd()(twins.q);
    std::vector<Collectives> steps;
    for (int step = 0; step < 4; ++step) {
      test.backward(*twins.plain, twins.joined);
      steps.push_back(collectives_of(twins, [&] { test.backward(*twins.sharded, twins.part); }));
      EXPECT_SAME_GRADS(twins, kClose);
      optimizer_p->step();
      optimizer_q->step();
      twins.zero_grad();
      EXPECT_LE(steps[step].all_gathers, test.most_all_gathers) << "step " << step;
      EXPECT_LE(steps[step].reduce_scatters, test.most_reduce_scatters) << "step " << step;
    }
    EXPECT_EQ(steps[0].all_gathers, steps[1].all_gathers);
    EXPECT_EQ(steps[1].all_gathers, steps[2].all_gathers);
    EXPECT_EQ(steps[0].reduce_scatters, steps[2].reduce_scatters);
    // Nothing predicts the first step; the first predicts the others.
    EXPECT_GE(steps[0].meetings, steps[0].all_gathers);
    EXPECT_EQ(steps[2].meetings, 0);
    EXPECT_EQ(steps[3].meetings, 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Nets, Counts, ::testing::Range(size_t{0}, count_cases().size()),
                         [](const auto& info) { return count_cases()[info.param].name; });

TEST(Counts, OptimizerStepsAndZeroingCommunicateNothing) {
  run_on_ranks(2, [](const RankContext& rank) {
    for (auto& [name, make] : all_optimizers()) {
      Twins twins(rank, net_of<Blocks>());
      auto optimizer = make(twins.q);
      for (int step = 0; step < 2; ++step) {
        twins.sharded->loss(twins.part).backward();
        const auto used = collectives_of(twins, [&] {
          optimizer->step();
          optimizer->zero_grad();
        });
        EXPECT_EQ(used.all_gathers + used.reduce_scatters + used.meetings, 0) << name;
      }
    }
  });
}

TEST(Counts, AGroupWithoutGradientsIsNotReduced) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, net_of<Blocks>());
    for (auto* net : {twins.plain.get(), twins.sharded.get()}) {
      for (auto& parameter : Twins::as<Blocks>(*net).blocks[1]->parameters()) {
        parameter.set_requires_grad(false);
      }
    }
    const auto used = collectives_of(twins, [&] { twins.backward(); });
    EXPECT_EQ(used.reduce_scatters, 4);
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

// Each parameter may start at a multiple of it, and a few bytes a parameter may travel beside its gradient.
constexpr int64_t kAlignment = 16;

// Most bytes of parameters once cut for `size` ranks, per rank: padded to equal shards and aligned.
int64_t shard_bytes(const std::vector<at::Tensor>& plain, int64_t size) {
  int64_t bytes = 0;
  for (const auto& parameter : plain) {
    const int64_t rows = parameter.size(0), padded = (rows + size - 1) / size;
    bytes += padded * (parameter.numel() / rows) * parameter.element_size() + kAlignment;
  }
  return bytes;
}

int64_t own_bytes(const std::vector<at::Tensor>& sharded) {
  int64_t bytes = 0;
  for (const auto& parameter : sharded) {
    bytes += static_cast<int64_t>(DTensor(parameter).to_local().nbytes());
  }
  return bytes;
}

std::vector<at::Tensor> root_parameters(Blocks& net) {
  auto parameters = net.in->parameters();
  for (const auto& parameter : net.out->parameters()) {
    parameters.push_back(parameter);
  }
  return parameters;
}

TEST(Memory, AtRestIsTheNthPart) {
  for (int size : {1, 2, 3, 4}) {
    run_on_ranks(size, [](const RankContext& rank) {
      Twins twins(rank, net_of<Blocks>());
      const auto padded = shard_bytes(twins.p, rank.size());
      const auto resting = twins.stats().parameters.current;
      EXPECT_LE(resting, padded);
      EXPECT_GE(resting, own_bytes(twins.q));
      EXPECT_EQ(twins.stats().gradients.current, 0);
      EXPECT_EQ(twins.stats().other.current, 0);
      EXPECT_EQ(twins.stats().gathered.current, 0);
      torch::optim::Adam optimizer(twins.q);
      twins.sharded->loss(twins.part).backward();
      optimizer.step();
      EXPECT_EQ(twins.stats().parameters.current, resting);
      EXPECT_LE(twins.stats().gradients.current, padded);
      EXPECT_GE(twins.stats().gradients.current, own_bytes(twins.q));
      EXPECT_LE(twins.stats().other.current, 2 * padded);
      EXPECT_GE(twins.stats().other.current, 2 * own_bytes(twins.q));
      EXPECT_EQ(twins.stats().buffers.current, 0);
      optimizer.zero_grad();
      EXPECT_EQ(twins.stats().gradients.current, 0);
    });
  }
}

TEST(Memory, GatheredAndBuffersStayWithinTheirBudget) {  // behaviours 130
  for (int size : {2, 3}) {
    run_on_ranks(size, [](const RankContext& rank) {
      Twins twins(rank, net_of<Blocks>());
      const auto n = rank.size();
      const auto block = n * shard_bytes(Twins::as<Blocks>(*twins.plain).blocks[0]->parameters(), n);
      const auto root = n * shard_bytes(root_parameters(Twins::as<Blocks>(*twins.plain)), n);
      auto optimizer = sgd()(twins.q);
      for (int step = 0; step < 3; ++step) {
        reset_peak_memory_stats(*twins.sharded);
        twins.sharded->loss(twins.part).backward();
        optimizer->step();
        optimizer->zero_grad();
        EXPECT_LE(twins.stats().gathered.peak, root + 2 * block) << "step " << step;
        EXPECT_GE(twins.stats().gathered.peak, block);
        EXPECT_LE(twins.stats().buffers.peak, 2 * block) << "step " << step;
        EXPECT_EQ(twins.stats().gathered.current, 0) << "after backward";
      }
    });
  }
}

TEST(Memory, FrozenNetHoldsAtMostTwoGroups) {
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::Sequential net;
    for (int i = 0; i < 10; ++i) {
      net->push_back(torch::nn::Linear(16, 16));
    }
    fill_parameters(*net, 1);
    const auto group = 2 * shard_bytes(net->ptr(0)->parameters(), 2);
    for (auto& parameter : net->parameters()) {
      parameter.set_requires_grad(false);
    }
    for (int i = 0; i < 10; ++i) {
      fully_shard(*net->ptr(i), {.mesh = rank.mesh});
    }
    fully_shard(net, {.mesh = rank.mesh});
    auto x = torch::ones({4, 16}, torch::requires_grad());
    for (int step = 0; step < 3; ++step) {
      reset_peak_memory_stats(*net);
      const auto before = memory_stats(*net);
      net->forward(x).square().mean().backward();
      EXPECT_LE(memory_stats(*net).gathered.peak, 2 * group) << "step " << step;
      EXPECT_EQ(memory_stats(*net).num_reduce_scatters, before.num_reduce_scatters);
    }
    EXPECT_TRUE(x.grad().defined());
  });
}

// Evaluation only, as a server or a validation loop does it, with a second model beside the first.
TEST(Memory, FlatOverForwardsWithoutGrad) {  // R19
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, net_of<Blocks>()), second(rank, net_of<Mlp>());
    const auto block = 2 * shard_bytes(Twins::as<Blocks>(*twins.plain).blocks[0]->parameters(), 2);
    const auto root = 2 * shard_bytes(root_parameters(Twins::as<Blocks>(*twins.plain)), 2);
    const torch::NoGradGuard no_grad;
    std::vector<int64_t> live;
    for (int round = 0; round < 10; ++round) {
      EXPECT_LE(difference(twins.plain->forward(twins.part), twins.sharded->forward(twins.part)), kClose);
      EXPECT_LE(difference(second.plain->forward(second.part), second.sharded->forward(second.part)), kClose);
      const auto weights = full_state_dict(*twins.sharded);
      EXPECT_EQ(weights.size(), rank.rank() == 0 ? twins.p.size() : 0);
      const auto stats = twins.stats();
      EXPECT_LE(stats.gathered.current, root + 2 * block);
      live.push_back(stats.parameters.current + stats.gathered.current + stats.buffers.current + stats.other.current +
                     second.stats().gathered.current + second.stats().buffers.current);
    }
    for (size_t round = 2; round < live.size(); ++round) {
      EXPECT_EQ(live[round], live[1]) << "round " << round;
    }
  });
}

TEST(Memory, TrainEvaluateTrainGivesTheLossOfTrainTrain) {  // R19
  run_on_ranks(2, [](const RankContext& rank) {
    std::vector<double> losses;
    for (bool evaluate : {false, true}) {
      Twins twins(rank, net_of<Mlp>());
      auto optimizer = sgd()(twins.q);
      double loss = 0;
      for (int step = 0; step < 3; ++step) {
        auto value = twins.sharded->loss(twins.part);
        value.backward();
        optimizer->step();
        optimizer->zero_grad();
        loss = value.item<double>();
        if (evaluate) {
          const torch::NoGradGuard no_grad;
          twins.sharded->forward(twins.joined);
          (void)full_state_dict(*twins.sharded);
        }
      }
      losses.push_back(loss);
    }
    EXPECT_EQ(losses[0], losses[1]);
  });
}

}  // namespace
}  // namespace fsdp::testing
