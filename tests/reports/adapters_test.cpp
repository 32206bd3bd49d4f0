// Adapters beside frozen weights (field_reports R14).
#include "support/parity.h"

namespace fsdp::testing {
namespace {

// A frozen base 8 x 8 with adapters of rank 2.
struct Adapted : torch::nn::Module {
  Adapted() {
    base = register_parameter("base", torch::empty({8, 8}), /*requires_grad=*/false);
    a = register_parameter("a", torch::empty({2, 8}));
    b = register_parameter("b", torch::empty({8, 2}));
  }
  at::Tensor forward(const at::Tensor& x) { return torch::linear(x, base) + torch::linear(torch::linear(x, a), b); }
  at::Tensor base, a, b;
};

class AdaptedNet : public TestNet {
 public:
  AdaptedNet() {
    for (int i = 0; i < 4; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), std::make_shared<Adapted>()));
  }
  at::Tensor forward(const at::Tensor& x) override {
    auto h = x;
    for (const auto& block : blocks) h = block->forward(h).tanh();
    return h;
  }
  std::vector<torch::nn::Module*> units() override {
    std::vector<torch::nn::Module*> units;
    for (const auto& block : blocks) units.push_back(block.get());
    units.push_back(this);
    return units;
  }
  at::Tensor batch(int64_t batch_size, at::Generator generator) const override {
    return torch::randn({batch_size, 8}, generator);
  }
  std::vector<std::shared_ptr<Adapted>> blocks;
};

TEST(R14, OnlyAdaptersAreReduced) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<AdaptedNet>());
    twins.backward();
    for (const auto& block : Twins::as<AdaptedNet>(*twins.sharded).blocks) {
      EXPECT_FALSE(block->base.grad().defined());
      EXPECT_GT(whole(block->a.grad()).abs().sum().item<float>(), 0);
      EXPECT_GT(whole(block->b.grad()).abs().sum().item<float>(), 0);
    }
    EXPECT_SAME_GRADS(twins, kClose);
    EXPECT_EQ(twins.stats().num_reduce_scatters, 4);
    if (rank.size() == 2) {
      EXPECT_EQ(twins.stats().gradients.current, 4 * 16 * 4) << "32 elements are reduced a block, not 96";
    }
    twins.zero_grad();
    for (auto& parameter : Twins::as<AdaptedNet>(*twins.sharded).blocks[1]->parameters())
      parameter.requires_grad_(false);
    twins.sharded->loss(twins.part).backward();
    EXPECT_EQ(twins.stats().num_reduce_scatters, 7) << "nothing to reduce in a frozen unit";
    EXPECT_EQ(twins.stats().gathered.current, 0) << "and it is resharded";
  });
}

TEST(R14, FrozenRootOnEightRanksDoesNotHang) {
  run_on_ranks(8, [](const RankContext& rank) {
    Twins twins(rank, net_of<AdaptedNet>(), {.rows_per_rank = 1, .shard = false});
    for (auto* net : {twins.plain.get(), twins.sharded.get()})
      net->register_parameter("frozen", torch::ones({16}), /*requires_grad=*/false);
    shard_units(*twins.sharded, rank.mesh);
    std::vector<at::Tensor> p, q;
    for (const auto& parameter : twins.plain->parameters())
      if (parameter.requires_grad()) p.push_back(parameter);
    for (const auto& parameter : twins.sharded->parameters())
      if (parameter.requires_grad()) q.push_back(parameter);
    const auto optimizer_p = sgd()(p), optimizer_q = sgd()(q);
    for (int step = 0; step < 20; ++step) {
      twins.plain->loss(twins.joined).backward();
      twins.sharded->loss(twins.part).backward();
      EXPECT_LE(own_difference(grads(p), grads(q)), 1e-5) << "step " << step;
      optimizer_p->step();
      optimizer_q->step();
      twins.zero_grad();
      twins.next_batch();
    }
    EXPECT_LE(difference(p, q), 1e-5);
  });
}

}  // namespace
}  // namespace fsdp::testing
