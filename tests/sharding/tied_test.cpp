// One parameter under two names, in one group and across groups.
#include "support/parity.h"

namespace fsdp::testing {
namespace {

class Tied : public TestNet {
 public:
  Tied() {
    table = register_module("table", torch::nn::Embedding(5, 2));
    head = register_module("head", tied_linear(table->weight));
  }
  at::Tensor forward(const at::Tensor&) override {
    return table(torch::arange(5)).sum() + head(torch::ones({1, 2})).sum();
  }
  std::vector<torch::nn::Module*> units() override { return {this}; }
  at::Tensor batch(int64_t batch_size, at::Generator) const override { return torch::ones({batch_size}); }
  at::Tensor loss(const at::Tensor& x) override { return forward(x); }

  torch::nn::Embedding table{nullptr};
  torch::nn::Linear head{nullptr};
};

// Every entry is read twice, so its gradient is 2.
void train_one_step(const RankContext& rank, const std::function<void(Tied&)>& shard) {
  Twins twins(rank, net_of<Tied>(), {.shard = false});
  auto& net = Twins::as<Tied>(*twins.sharded);
  shard(net);
  EXPECT_TRUE(net.table->weight.is_same(net.head->weight));
  EXPECT_EQ(twins.q.size(), 1u);
  const auto before = whole(net.table->weight);
  const auto local_rows = DTensor(net.table->weight).to_local().size(0);
  EXPECT_EQ(local_rows, rank.size() == 2 ? (rank.rank() == 0 ? 3 : 2) : (rank.rank() < 2 ? 2 : 1));
  net.loss(twins.part).backward();
  EXPECT_LE(difference(torch::full({5, 2}, 2.0), net.head->weight.grad()), kClose);
  sgd(0.1)({net.table->weight})->step();
  EXPECT_LE(difference(before - 0.2, net.table->weight), kClose);
  EXPECT_LE(difference(before - 0.2, net.head->weight), kClose);
}

TEST(Tied, InOneGroup) {  // R02
  on_two_and_three(
      [](const RankContext& rank) { train_one_step(rank, [&](Tied& net) { fully_shard(net, {.mesh = rank.mesh}); }); });
}

TEST(Tied, AcrossGroupsTheFirstClaimerOwnsIt) {  // behaviours 28, R02: trains instead of raising
  on_two_and_three([](const RankContext& rank) {
    train_one_step(rank, [&](Tied& net) {
      fully_shard(net.table, {.mesh = rank.mesh});
      fully_shard(net.head, {.mesh = rank.mesh});
      fully_shard(net, {.mesh = rank.mesh});
    });
  });
}

TEST(Tied, GptTrainsAsOneProcess) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Gpt>(2, /*tied=*/true));
    expect_same_training(twins);
  });
}

TEST(Tied, GptWithEmbeddingAndHeadInGroupsOfTheirOwn) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Gpt>(1, /*tied=*/true), {.shard = false});
    auto& net = Twins::as<Gpt>(*twins.sharded);
    fully_shard(net.token, {.mesh = rank.mesh});
    fully_shard(net.head, {.mesh = rank.mesh});
    shard_units(net, rank.mesh);
    expect_same_training(twins);
  });
}

TEST(Tied, SharedModuleUnderTwoNames) {
  on_two_and_three([](const RankContext& rank) {
    struct Net : torch::nn::Module {
      Net() {
        a = register_module("a", std::make_shared<TanhLinear>(6));
        register_module("b", a);
      }
      at::Tensor forward(const at::Tensor& x) { return a->forward(a->forward(x)); }
      std::shared_ptr<TanhLinear> a;
    };
    auto plain = std::make_shared<Net>(), sharded = std::make_shared<Net>();
    fill_parameters(*plain, 2);
    fill_parameters(*sharded, 2);
    fully_shard(sharded->a, {.mesh = rank.mesh});
    fully_shard(sharded, {.mesh = rank.mesh});
    const auto x = torch::ones({2, 6});
    plain->forward(x).sum().backward();
    sharded->forward(x).sum().backward();
    EXPECT_LE(difference(plain->a->linear->weight.grad(), sharded->a->linear->weight.grad()), kClose);
  });
}

}  // namespace
}  // namespace fsdp::testing
