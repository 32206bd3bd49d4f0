// PyTorch's own scenarios about what modules look like: methods, outputs of every kind, frozen and ignored parts, two
// roots (behaviours 37, 38, 112, 114, 117, 120).
#include <torch/csrc/autograd/functions/utils.h>

#include "support/parity.h"

namespace fsdp::testing {
namespace {

// The patch embedding of a vision transformer; encode() is the method that trains.
class Patches : public TestNet {
 public:
  Patches() {
    using torch::nn::Conv2dOptions;
    conv = register_module("conv", torch::nn::Conv2d(Conv2dOptions(3, 1024, 14).stride(14)));
    head = register_module("head", torch::nn::Linear(1024, 3));
  }
  at::Tensor forward(const at::Tensor& x) override { return head(encode(x)); }
  at::Tensor encode(const at::Tensor& x) { return conv(x).flatten(2).mean(2); }  // [B, 1024]
  std::vector<torch::nn::Module*> units() override { return {conv.get(), this}; }
  at::Tensor batch(int64_t batch_size, at::Generator generator) const override {
    return torch::empty({batch_size, 3, 28, 28}).normal_(0, 1, generator);
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::Linear head{nullptr};
};

TEST(Scenario, MethodOfAPatchEmbedding) {  // behaviours 37
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Patches>());
    std::vector<at::Tensor> encoded;
    twins.both([&](TestNet& net, const at::Tensor&) { encoded.push_back(Twins::as<Patches>(net).encode(twins.part)); });
    EXPECT_LE(difference(encoded[0].detach(), encoded[1].detach()), kClose);
    expect_same_training(twins, {.num_steps = 3, .backward = [](TestNet& net, const at::Tensor& x) {
                                   Twins::as<Patches>(net).encode(x).square().mean().backward();
                                 }});
  });
}

TEST(Scenario, TwoStagesThatAreRootsByThemselves) {  // behaviours 38
  on_two_and_three([](const RankContext& rank) {
    Twins first(rank, net_of<Mlp>(7, 13, 5, 6)), second(rank, net_of<Mlp>(6, 11, 5, 3));
    for (int step = 0; step < 3; ++step) {
      const auto p = second.plain->forward(first.plain->forward(first.joined)).square().mean();
      const auto q = second.sharded->forward(first.sharded->forward(first.part)).square().mean();
      p.backward();
      q.backward();
      EXPECT_NEAR(p.item<double>(), mean_over_ranks(q, rank.group), 1e-5);
      for (auto* stage : {&first, &second}) {
        EXPECT_SAME_GRADS(*stage, kClose);
        EXPECT_EQ(stage->stats().gathered.current, 0);
        EXPECT_EQ(stage->stats().buffers.current, 0);
        stage->zero_grad();
      }
    }
  });
}

// Each layer gives its output in another kind of container.
class Containers : public TestNet {
 public:
  struct Pair {
    at::Tensor a, b;
    int count;
  };
  Containers() {
    for (int i = 0; i < 4; ++i) layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(8, 8)));
  }
  Pair as_struct(const at::Tensor& x) { return {layers[0](x), x.sin(), 2}; }
  std::vector<at::Tensor> as_list(const at::Tensor& x) { return layers[1](x).chunk(2, 1); }
  std::tuple<at::Tensor, std::string, at::Tensor> as_tuple(const at::Tensor& x) {
    return {layers[2](x), "name", x.cos()};
  }
  std::map<std::string, at::Tensor> as_map(const at::Tensor& x) { return {{"y", layers[3](x)}, {"unused", x + 1}}; }
  at::Tensor forward(const at::Tensor& x) override {
    const auto [a, b, count] = as_struct(x);
    const auto list = as_list(a + b * count);
    const auto [y, name, z] = as_tuple(torch::cat({list[1], list[0]}, 1));
    return as_map(y * z).at("y");
  }
  std::vector<torch::nn::Module*> units() override {
    std::vector<torch::nn::Module*> units;
    for (auto& layer : layers) units.push_back(layer.get());
    units.push_back(this);
    return units;
  }
  at::Tensor batch(int64_t batch_size, at::Generator generator) const override {
    return torch::empty({batch_size, 8}).normal_(0, 1, generator);
  }
  std::vector<torch::nn::Linear> layers;
};

TEST(Scenario, OutputsInContainers) {  // behaviours 112
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Containers>());
    expect_same_training(twins, {.num_steps = 3});
    EXPECT_EQ(twins.stats().num_reduce_scatters, 3 * 4) << "the backward of every layer ran";
  });
}

struct StepOfItsOwn : torch::autograd::PostAccumulateGradHook {
  explicit StepOfItsOwn(torch::optim::Optimizer& optimizer) : optimizer(optimizer) {}
  void operator()(const torch::autograd::Variable& parameter) override {
    optimizer.step();
    parameter.mutable_grad().reset();
  }
  torch::optim::Optimizer& optimizer;
};

TEST(Scenario, OptimizerInBackwardIsBitwiseTheNormalStep) {  // behaviours 114
  on_two_and_three([](const RankContext& rank) {
    Twins normal(rank, net_of<Gpt>()), in_backward(rank, net_of<Gpt>());
    const auto optimizer = all_optimizers()[5].make(normal.q);
    std::vector<std::unique_ptr<torch::optim::Optimizer>> own;
    for (auto& parameter : in_backward.q) {
      own.push_back(all_optimizers()[5].make({parameter}));
      torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<StepOfItsOwn>(*own.back()));
    }
    for (int step = 0; step < 5; ++step) {
      normal.sharded->zero_grad();
      normal.sharded->loss(normal.part).backward();
      optimizer->step();
      in_backward.sharded->loss(in_backward.part).backward();
      for (size_t i = 0; i < normal.q.size(); ++i) {
        const auto expected = DTensor(normal.q[i]).to_local(), actual = DTensor(in_backward.q[i]).to_local();
        EXPECT_TRUE(torch::equal(expected, actual)) << "step " << step << ", parameter " << i;
      }
      normal.next_batch();
      in_backward.next_batch();
    }
  });
}

TEST(Scenario, FrozenWeightsAndAnInputWithoutGradient) {  // behaviours 117
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Blocks>(Blocks::Kind::kPlain, 6));
    for (const bool biases_frozen : {false, true}) {
      for (auto* parameters : {&twins.p, &twins.q})
        for (auto& parameter : *parameters) parameter.requires_grad_((parameter.dim() == 1) != biases_frozen);
      const auto before = twins.stats().num_reduce_scatters;
      twins.backward();
      EXPECT_EQ(twins.stats().num_reduce_scatters - before, 7) << "six blocks and the root";
      EXPECT_EQ(twins.stats().gathered.current, 0);
      EXPECT_SAME_GRADS(twins, kClose);
      twins.zero_grad();
    }
  });
}

// a - b(b.lin_b, b.c) - where c stays out of the wrapped b.
class Nested : public TestNet {
 public:
  Nested() {
    a = register_module("a", torch::nn::Linear(8, 8));
    b = register_module("b", std::make_shared<torch::nn::Module>());
    lin_b = b->register_module("lin_b", torch::nn::Linear(8, 8));
    scale = b->register_parameter("scale", torch::ones({8}));
    c = b->register_module("c", torch::nn::Linear(8, 8));
  }
  at::Tensor forward(const at::Tensor& x) override { return c(lin_b(a(x).tanh()) * scale).tanh(); }
  std::vector<torch::nn::Module*> units() override { return {lin_b.get(), b.get()}; }
  at::Tensor batch(int64_t batch_size, at::Generator generator) const override {
    return torch::empty({batch_size, 8}).normal_(0, 1, generator);
  }
  torch::nn::Linear a{nullptr}, lin_b{nullptr}, c{nullptr};
  std::shared_ptr<torch::nn::Module> b;
  at::Tensor scale;
};

TEST(Scenario, IgnoredModuleInsideAWrappedOne) {  // behaviours 120
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Nested>(), {.shard = false});
    auto& net = Twins::as<Nested>(*twins.sharded);
    shard_units(net, {.mesh = rank.mesh, .ignored_params = net.c->parameters()});
    std::vector<std::string> wrapped, sharded;
    for (const auto& item : net.named_modules())
      if (is_fsdp(*item.value())) wrapped.push_back(item.key());
    for (const auto& item : net.named_parameters())
      if (DTensor::is(item.value())) sharded.push_back(item.key());
    EXPECT_EQ(wrapped, (std::vector<std::string>{"b", "b.lin_b"}));
    EXPECT_EQ(sharded, (std::vector<std::string>{"b.scale", "b.lin_b.weight", "b.lin_b.bias"}));
    auto p = sgd()(twins.p), q = sgd()(twins.q);
    for (int step = 0; step < 10; ++step) {
      const auto expected = twins.plain->loss(twins.joined), loss = twins.sharded->loss(twins.part);
      expected.backward();
      loss.backward();
      EXPECT_NEAR(expected.item<double>(), mean_over_ranks(loss, rank.group), 1e-5) << "step " << step;
      for (const auto& parameter : twins.q) {  // what data parallelism does for the parts that are not sharded
        if (DTensor::is(parameter)) continue;
        std::vector<at::Tensor> sum{parameter.grad()};
        rank.group->allreduce(sum)->wait();
        parameter.mutable_grad().div_(rank.size());
      }
      p->step();
      q->step();
      twins.zero_grad();
      twins.next_batch();
    }
    EXPECT_SAME_PARAMETERS(twins, 1e-5);
  });
}

}  // namespace
}  // namespace fsdp::testing
