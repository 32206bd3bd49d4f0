// PyTorch's scenarios about the dtype that modules see. What is asserted here is what their operators see, and what
// fsdp::call makes of a boundary.
#include "support/parity.h"

namespace fsdp::testing {
namespace {

constexpr MixedPrecisionPolicy kHalfPolicy{.param_dtype = at::kHalf, .reduce_dtype = at::kFloat};
constexpr MixedPrecisionPolicy kBf16Policy{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};

TEST(CastInputs, OfEveryMemberOfAGroup) {  // behaviours 18
  on_two_and_three([](const RankContext& rank) {
    torch::nn::Sequential net(torch::nn::Linear(8, 8), torch::nn::Linear(8, 8),
                              torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})));
    fill_parameters(*net, 1);
    fully_shard({net->ptr(0), net->ptr(1), net->ptr(2)}, {.mesh = rank.mesh, .mp_policy = kBf16Policy});
    const auto x = torch::rand({2, 8}, torch::requires_grad());
    for (size_t i = 0; i < 3; ++i) {
      const auto y = torch::nn::AnyModule(*(net->begin() + static_cast<int64_t>(i))).forward(x);
      EXPECT_EQ(y.scalar_type(), at::kBFloat16) << "member " << i;
      y.sum().backward();
      EXPECT_EQ(x.grad().scalar_type(), at::kFloat) << "the cast is part of the graph";
    }
    for (const auto& parameter : net->parameters()) EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
  });
}

struct Features {
  at::Tensor x, ids, mask;
  int count;
};

struct StructuredModule : torch::nn::Module {
  StructuredModule() {
    linear = register_module("linear", torch::nn::Linear(4, 4));
    table = register_module("table", torch::nn::Embedding(6, 4));
    fill_parameters(*this, 1);
  }
  Features forward(const Features& in) {
    const auto y = linear(in.x).masked_fill(in.mask.logical_not(), 0) + table(in.ids);
    return {y, in.ids, in.mask, in.count};
  }
  torch::nn::Linear linear{nullptr};
  torch::nn::Embedding table{nullptr};
};

TEST(CastInputs, OfAStruct) {  // behaviours 75
  run_on_ranks(2, [](const RankContext& rank) {
    StructuredModule net;
    fully_shard(net, {.mesh = rank.mesh, .mp_policy = kBf16Policy});
    const Features in{torch::rand({3, 4}), torch::tensor({5, 0, 2}), torch::tensor({{true}, {false}, {true}}), 7};
    const Features out = fsdp::call(net, in);
    EXPECT_EQ(out.x.scalar_type(), at::kBFloat16) << "the linear layer, and the sum with the table";
    EXPECT_EQ(out.ids.scalar_type(), at::kLong);
    EXPECT_EQ(out.mask.scalar_type(), at::kBool);
    EXPECT_EQ(out.count, 7);
    EXPECT_EQ(in.x.scalar_type(), at::kFloat) << "what was given stays as it is";
  });
}

struct NestedModule : torch::nn::Module {
  using Nested = std::tuple<std::vector<at::Tensor>, std::pair<at::Tensor, int>, std::string>;
  NestedModule() { weight = register_parameter("weight", torch::ones({4})); }
  Nested forward(const Nested& in) {
    for (const auto& tensor : std::get<0>(in)) seen.push_back(tensor.scalar_type());
    seen.push_back(std::get<1>(in).first.scalar_type());
    return in;
  }
  at::Tensor weight;
  std::vector<at::ScalarType> seen;
};

TEST(CastInputs, NestedInTuplesPairsAndVectors) {  // behaviours 75
  run_on_ranks(2, [](const RankContext& rank) {
    NestedModule net;
    auto policy = kBf16Policy;
    policy.output_dtype = at::kDouble;
    fully_shard(net, {.mesh = rank.mesh, .mp_policy = policy});
    const NestedModule::Nested in{
        {torch::ones({2}), torch::arange(2), torch::tensor({true})}, {torch::ones({1}), 3}, "s"};
    const auto out = fsdp::call(net, in);
    static_assert(std::is_same_v<decltype(out), const NestedModule::Nested>);
    using Dtypes = std::vector<at::ScalarType>;
    EXPECT_EQ(net.seen, (Dtypes{at::kBFloat16, at::kLong, at::kBool, at::kBFloat16}));
    EXPECT_EQ(std::get<0>(out)[0].scalar_type(), at::kDouble);
    EXPECT_EQ(std::get<0>(out)[1].scalar_type(), at::kLong);
    EXPECT_EQ(std::get<0>(out)[2].scalar_type(), at::kBool);
    EXPECT_EQ(std::get<1>(out).second, 3);
    EXPECT_EQ(std::get<2>(out), "s");
  });
}

// Two layers; one of them computes in fp16, in the three ways in which its input can get there.
struct TwoLayers {
  explicit TwoLayers(const RankContext& rank, int which, const MixedPrecisionPolicy& policy) {
    fill_parameters(*net, 1);
    fully_shard(*net->ptr(which), {.mesh = rank.mesh, .mp_policy = policy});
    fully_shard(net, {.mesh = rank.mesh});
  }
  [[nodiscard]] torch::nn::LinearImpl& layer(int i) const { return *net->ptr(i)->as<torch::nn::Linear>(); }
  torch::nn::Sequential net{torch::nn::Linear(4, 4), torch::nn::Linear(4, 4)};
};

TEST(HalfPrecisionSubmodule, CastWhereItIsNeeded) {  // behaviours 76
  run_on_ranks(2, [](const RankContext& rank) {
    const auto x = torch::rand({2, 4});
    {
      const TwoLayers second(rank, 1, kHalfPolicy);
      const auto h = second.layer(0).forward(x);
      EXPECT_EQ(h.scalar_type(), at::kFloat);
      EXPECT_EQ(second.layer(1).forward(h).scalar_type(), at::kHalf) << "the library casts";
    }
    {
      auto policy = kHalfPolicy;
      policy.cast_forward_inputs = false;
      const TwoLayers second(rank, 1, policy);
      const auto h = second.layer(0).forward(x);
      EXPECT_NE(error_of([&] { (void)second.layer(1).forward(h); }), "") << "nobody casts";
      const auto y = second.layer(1).forward(h.to(at::kHalf));
      EXPECT_EQ(y.scalar_type(), at::kHalf) << "the user casts";
      y.sum().backward();
      EXPECT_EQ(second.layer(0).weight.grad().scalar_type(), at::kFloat);
    }
    {
      auto policy = kHalfPolicy;
      policy.output_dtype = at::kFloat;
      const TwoLayers first(rank, 0, policy);
      EXPECT_EQ(first.layer(0).forward(x).scalar_type(), at::kHalf);
      const auto h = fsdp::call(first.layer(0), x);
      EXPECT_EQ(h.scalar_type(), at::kFloat);
      EXPECT_EQ(first.layer(1).forward(h).scalar_type(), at::kFloat);
    }
  });
}

template <class Norm>
void expect_norm_trains_in_half(const RankContext& rank, Norm norm, const at::Tensor& x) {
  fill_parameters(*norm, 1);
  fully_shard(norm, {.mesh = rank.mesh, .mp_policy = kHalfPolicy});
  for (const auto dtype : {at::kHalf, at::kFloat}) norm(x.to(dtype)).sum().backward();
  EXPECT_EQ(norm->weight.grad().scalar_type(), at::kFloat);
  for (const auto& buffer : norm->buffers()) EXPECT_NE(buffer.scalar_type(), at::kHalf) << "statistics stay";
}

TEST(HalfPrecisionSubmodule, NormLayers) {  // behaviours 79
  run_on_ranks(2, [](const RankContext& rank) {
    expect_norm_trains_in_half(rank, torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})), torch::rand({3, 4}));
    expect_norm_trains_in_half(rank, torch::nn::BatchNorm1d(4), torch::rand({3, 4}));
    expect_norm_trains_in_half(rank, torch::nn::BatchNorm2d(4), torch::rand({3, 4, 5, 5}));
  });
}

}  // namespace
}  // namespace fsdp::testing
