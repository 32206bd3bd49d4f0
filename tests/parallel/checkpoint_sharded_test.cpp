// checkpoint() around, inside and across sharded blocks: the gradients of one process without it, and no collective
// more.
#include <fsdp/activation_checkpoint.h>
#include <fsdp/saved_tensor_hooks.h>

#include "support/parity.h"
#include "support/spawn_ranks.h"

namespace fsdp::testing {
namespace {

enum class Where { kNowhere, kAroundBlocks, kInsideBlocks, kAroundPairs, kNested, kAroundModel };

struct ResidualBlock : torch::nn::Module {
  ResidualBlock() {
    first = register_module("first", torch::nn::Linear(10, 17));
    second = register_module("second", torch::nn::Linear(17, 10));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto feed = [first = first, second = second](const at::Tensor& t) mutable { return second(torch::gelu(first(t))); };
    return x + (checkpoint_inside ? checkpoint(feed, x.tanh()) : feed(x.tanh()));
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  bool checkpoint_inside = false;
};

// Four blocks under a root with parameters of its own.
class CheckpointedNet : public TestNet {
 public:
  explicit CheckpointedNet(Where where) {
    in = register_module("in", torch::nn::Linear(7, 10));
    for (int i = 0; i < 4; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), std::make_shared<ResidualBlock>()));
    }
    out = register_module("out", torch::nn::Linear(10, 3));
    set_where(where);
  }

  void set_where(Where where) {
    where_ = where;
    for (auto& block : blocks) block->checkpoint_inside = where == Where::kInsideBlocks || where == Where::kNested;
  }

  at::Tensor forward(const at::Tensor& x) override {
    if (where_ == Where::kAroundModel) return checkpoint([this](const at::Tensor& t) { return out(run(in(t))); }, x);
    return out(run(in(x)));
  }

  std::vector<torch::nn::Module*> units() override {
    std::vector<torch::nn::Module*> units;
    for (auto& block : blocks) units.push_back(block.get());
    units.push_back(this);
    return units;
  }
  at::Tensor batch(int64_t batch_size, at::Generator generator) const override {
    return torch::empty({batch_size, 7}).normal_(0, 1, generator);
  }

  torch::nn::Linear in{nullptr}, out{nullptr};
  std::vector<std::shared_ptr<ResidualBlock>> blocks;

 private:
  at::Tensor run(at::Tensor x) {
    const bool in_pairs = where_ == Where::kAroundPairs || where_ == Where::kNested;
    for (size_t i = 0; i < blocks.size(); i += 2) {
      const auto pair = [a = blocks[i], b = blocks[i + 1], around = where_ == Where::kAroundBlocks](at::Tensor t) {
        for (const auto& block : {a, b}) t = around ? checkpoint(block, t) : block->forward(t);
        return t;
      };
      x = in_pairs ? checkpoint(pair, x) : pair(x);
    }
    return x;
  }
  Where where_ = Where::kNowhere;
};

// The plain net never checkpoints.
Twins twins_with(const RankContext& rank, Where where, std::optional<bool> reshard = std::nullopt) {
  Twins twins(rank, net_of<CheckpointedNet>(where), {.reshard_after_forward = reshard});
  Twins::as<CheckpointedNet>(*twins.plain).set_where(Where::kNowhere);
  return twins;
}

class ShardedCheckpoint : public ::testing::TestWithParam<Where> {};

TEST_P(ShardedCheckpoint, TrainsAsOneProcessWithoutIt) {
  for (const int size : {1, 2, 3}) {
    run_on_ranks(size, [](const RankContext& rank) {
      for (const std::optional<bool> reshard : {std::optional<bool>(), std::optional(false)}) {
        auto twins = twins_with(rank, GetParam(), reshard);
        expect_same_training(twins, {.num_steps = 4});
      }
    });
  }
}

TEST_P(ShardedCheckpoint, EveryWayToDriveTheEngine) {
  run_on_ranks(2, [](const RankContext& rank) {
    auto twins = twins_with(rank, GetParam());
    twins.both([](TestNet& net, const at::Tensor& x) { (net.loss(x) + net.loss(x * 2)).backward(); });
    EXPECT_SAME_GRADS(twins, kClose) << "two forwards, one backward";
    twins.both([](TestNet& net, const at::Tensor& x) {
      auto loss = net.loss(x);
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();
    });
    EXPECT_SAME_GRADS(twins, kClose) << "accumulated, retained graph";
    std::vector<std::vector<at::Tensor>> results;
    twins.both([&](TestNet& net, const at::Tensor& x) {
      results.push_back(torch::autograd::grad({net.loss(x)}, net.parameters()));
    });
    EXPECT_LE(difference(results[0], results[1]), kClose) << "autograd::grad";
    for (auto* net : {twins.plain.get(), twins.sharded.get()}) {
      for (auto& parameter : Twins::as<CheckpointedNet>(*net).blocks[2]->parameters())
        parameter.set_requires_grad(false);
    }
    twins.zero_grad();
    twins.backward();
    EXPECT_SAME_GRADS(twins, kClose) << "a frozen block";
  });
}

struct Collectives {
  int64_t all_gathers, reduce_scatters;
  bool operator==(const Collectives&) const = default;
};

std::vector<Collectives> collectives_of_steps(const RankContext& rank, Where where) {
  auto twins = twins_with(rank, where);
  auto optimizer = sgd()(twins.q);
  std::vector<Collectives> steps;
  for (int step = 0; step < 3; ++step) {
    const auto before = twins.stats();
    twins.sharded->loss(twins.part).backward();
    optimizer->step();
    optimizer->zero_grad();
    const auto after = twins.stats();
    steps.push_back(
        {after.num_all_gathers - before.num_all_gathers, after.num_reduce_scatters - before.num_reduce_scatters});
  }
  return steps;
}

TEST(CheckpointOfShards, CostsNoCollectiveOnAnyStep) {
  run_on_ranks(2, [](const RankContext& rank) {
    const auto without = collectives_of_steps(rank, Where::kNowhere);
    EXPECT_LE(without[0].all_gathers, 9);
    EXPECT_EQ(without[0].reduce_scatters, 5);
    for (const auto where : {Where::kAroundBlocks, Where::kInsideBlocks}) {
      const auto with = collectives_of_steps(rank, where);
      for (int step = 0; step < 3; ++step) {
        EXPECT_EQ(with[step].all_gathers, without[0].all_gathers) << "step " << step;
        EXPECT_EQ(with[step].reduce_scatters, 5) << "step " << step;
      }
    }
    // Backward goes through the groups again, last pair first, so it gathers what the second run freed.
    for (const auto& step : collectives_of_steps(rank, Where::kAroundPairs)) EXPECT_EQ(step.reduce_scatters, 5);
  });
}

TEST(CheckpointOfShards, StaysWithinTheBudgetOfGatheredParameters) {
  run_on_ranks(2, [](const RankContext& rank) {
    std::vector<int64_t> peaks;
    for (const auto where : {Where::kNowhere, Where::kAroundBlocks, Where::kAroundModel}) {
      auto twins = twins_with(rank, where);
      for (int step = 0; step < 3; ++step) {
        reset_peak_memory_stats(*twins.sharded);
        twins.sharded->loss(twins.part).backward();
        twins.zero_grad();
      }
      peaks.push_back(twins.stats().gathered.peak);
      EXPECT_EQ(twins.stats().gathered.current, 0);
    }
    EXPECT_LE(peaks[1], peaks[0]);
    EXPECT_LE(peaks[2], peaks[0]);
  });
}

TEST(CheckpointOfShards, HooksNeverSeeGatheredWeights) {
  run_on_ranks(2, [](const RankContext& rank) {
    auto twins = twins_with(rank, Where::kNowhere);
    int num_packed = 0;
    at::Tensor loss;
    {
      const SavedTensorHooks hooks([&](const at::Tensor& x) {
        ++num_packed;
        EXPECT_EQ(x.size(0), 2) << "an activation has as many rows as the batch, a weight more: " << x.sizes();
        return [copy = x.clone()] { return copy; };
      });
      loss = Twins::as<CheckpointedNet>(*twins.sharded).forward(twins.part).square().mean(-1);
    }
    EXPECT_GT(num_packed, 8);
    loss.mean().backward();
    twins.plain->loss(twins.joined).backward();
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

TEST(CheckpointOfShards, NoticesWeightsChangedBeforeBackward) {
  run_on_ranks(2, [](const RankContext& rank) {
    for (const auto where : {Where::kNowhere, Where::kInsideBlocks, Where::kAroundBlocks}) {
      auto twins = twins_with(rank, where);
      const auto loss = twins.sharded->loss(twins.part);
      {
        const torch::NoGradGuard no_grad;
        Twins::as<CheckpointedNet>(*twins.sharded).blocks[3]->second->weight.mul_(2);
      }
      EXPECT_CONTAINS(error_of([&] { loss.backward(); }), "modified by an inplace operation");
    }
  });
}

// A custom function that saves the handle of a parameter.
struct ScaleRows : torch::autograd::Function<ScaleRows> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& scale) {
    context->save_for_backward({x, scale});
    return x * scale;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    return {grads[0] * saved[1], {}};
  }
};

TEST(CheckpointOfShards, FunctionsMaySaveAShardedParameter) {
  run_on_ranks(2, [](const RankContext& rank) {
    auto twins = twins_with(rank, Where::kAroundBlocks);
    twins.both([](TestNet& net, const at::Tensor& x) {
      auto& in = Twins::as<CheckpointedNet>(net).in;
      const auto fn = [in](const at::Tensor& t, const at::Tensor& bias) mutable {
        return ScaleRows::apply(in(t).exp(), bias).exp();
      };
      (checkpoint(fn, x, in->bias.detach()).mean() + net.loss(x)).backward();
    });
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

TEST(CheckpointOfShards, ParametersAndWhatIsGatheredOfThemMayBeArguments) {
  on_two_and_three([](const RankContext& rank) {
    auto twins = twins_with(rank, Where::kAroundBlocks);
    twins.both([](TestNet& net, const at::Tensor& x) {
      const auto& weight = Twins::as<CheckpointedNet>(net).in->weight;
      const auto with_parameter = [](const at::Tensor& t, const at::Tensor& w) { return t.matmul(w.t()).tanh().exp(); };
      const auto with_view = [](const at::Tensor& t, const at::Tensor& w) { return t.exp().matmul(w).tanh().exp(); };
      const auto y = checkpoint(with_parameter, x, weight) + checkpoint(with_view, x, weight.t());
      (y.mean() + net.loss(x)).backward();
    });
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

// Ranks that use different parameters must all hear of it, also when the use is inside a checkpoint.
TEST(CheckpointOfShards, DifferentUseOfParametersIsAnErrorOnAllRanks) {
  run_on_ranks(2, [](const RankContext& rank) {
    struct Experts : torch::nn::Module {
      at::Tensor e0 = register_parameter("e0", torch::ones({2})), e1 = register_parameter("e1", torch::ones({2}));
    };
    Experts experts;
    fully_shard(experts, {.mesh = rank.mesh});
    const auto& own = rank.rank() == 0 ? experts.e0 : experts.e1;
    const auto text = error_of([&] {
      checkpoint([](const at::Tensor& e) { return (e * 4).exp().sum(); }, own).backward();
      (void)(own.grad() * 2);  // waits for the reduction
    });
    EXPECT_CONTAINS(text, "e0");
    EXPECT_CONTAINS(text, "on some ranks only");
  });
}

at::Tensor all_ranks(const at::Tensor& tensor) {
  std::vector<std::vector<at::Tensor>> parts(1);
  for (int i = 0; i < world_size(); ++i) parts[0].push_back(torch::empty_like(tensor));
  std::vector<at::Tensor> own{tensor};
  default_group()->allgather(parts, own)->wait();
  return at::stack(parts[0]);
}

struct DropoutBlock : torch::nn::Module {
  DropoutBlock() { linear = register_module("linear", torch::nn::Linear(16, 16)); }
  at::Tensor forward(const at::Tensor& x) {
    const auto mask = torch::dropout(torch::ones_like(x), 0.5, is_training());
    masks.push_back(mask);
    return x + linear(x).tanh() * mask;
  }
  torch::nn::Linear linear{nullptr};
  std::vector<at::Tensor> masks;  // of each run
};

// Two steps of two sharded blocks with dropout; the gradients of all parameters, whole.
std::vector<at::Tensor> train_with_dropout(bool with_checkpoint, const DeviceMesh& mesh) {
  torch::manual_seed(0);
  struct Net : torch::nn::Module {
    Net() {
      for (const auto* name : {"a", "b"}) blocks.push_back(register_module(name, std::make_shared<DropoutBlock>()));
    }
    std::vector<std::shared_ptr<DropoutBlock>> blocks;
  } net;
  for (auto& block : net.blocks) fully_shard(block, {.mesh = mesh});
  fully_shard(net, {.mesh = mesh});
  torch::manual_seed(1 + rank());
  for (int step = 0; step < 2; ++step) {
    auto x = torch::randn({4, 16});
    for (auto& block : net.blocks) {
      block->masks.clear();
      x = with_checkpoint ? checkpoint({.early_stop = false}, block, x) : block->forward(x);
    }
    x.square().mean().backward();
    for (auto& block : net.blocks) {
      EXPECT_EQ(block->masks.size(), with_checkpoint ? 2U : 1U);
      EXPECT_TRUE(at::equal(block->masks.front(), block->masks.back())) << "the second run drew another mask";
      const auto masks = all_ranks(block->masks.front());
      EXPECT_FALSE(at::equal(masks[0], masks[1])) << "both ranks drew the same mask";
    }
  }
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : net.parameters()) gradients.push_back(whole(parameter.grad()));
  gradients.push_back(torch::rand({4}));  // the generators end alike as well
  return gradients;
}

RANKS_BODY(dropout_in_a_checkpoint) {
  init_process_group();
  const auto mesh = init_device_mesh(torch::kCPU, {world_size()}, {"dp"});
  const auto plain = train_with_dropout(false, mesh), checkpointed = train_with_dropout(true, mesh);
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(at::equal(plain[i], checkpointed[i])) << i;
  destroy_process_group();
}

TEST(CheckpointOfShards, DropoutMasksAreEqualInTheSecondRunAndDifferBetweenRanks) {
  EXPECT_ALL_RANKS_OK(spawn_ranks(2, "dropout_in_a_checkpoint"));
}

std::string name_of(const ::testing::TestParamInfo<Where>& info) {
  switch (info.param) {
    case Where::kAroundBlocks:
      return "AroundBlocks";
    case Where::kInsideBlocks:
      return "InsideBlocks";
    case Where::kAroundPairs:
      return "AroundPairs";
    case Where::kNested:
      return "Nested";
    case Where::kAroundModel:
      return "AroundModel";
    case Where::kNowhere:
      break;
  }
  return "Nowhere";
}

INSTANTIATE_TEST_SUITE_P(Everywhere, ShardedCheckpoint,
                         ::testing::Values(Where::kAroundBlocks, Where::kInsideBlocks, Where::kAroundPairs,
                                           Where::kNested, Where::kAroundModel),
                         name_of);

}  // namespace
}  // namespace fsdp::testing
