// MixedPrecisionPolicy: who computes in which dtype, and what stays in fp32.
#include <sstream>

#include "support/counting_backend.h"
#include "support/parity.h"
#include "support/ranges.h"

namespace fsdp::testing {
namespace {

constexpr MixedPrecisionPolicy kMixed{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};

// What mixed precision means, by hand: fp32 parameters, a low-precision copy that computes, sums of its gradients.
class Reference {
 public:
  Reference(const NetFactory& make, const RankContext& rank, const MixedPrecisionPolicy& policy = kMixed)
      : rank_(rank),
        master_(make()),
        compute_(make()),
        dtype_(policy.param_dtype.value_or(at::kFloat)),
        reduce_dtype_(policy.reduce_dtype.value_or(dtype_)) {
    compute_->to(dtype_);
  }
  at::Tensor backward(const at::Tensor& x) {
    const auto masters = master_->parameters();
    const auto copies = compute_->parameters();
    {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < masters.size(); ++i) copies[i].copy_(masters[i]);
    }
    auto loss = compute_->loss(x.is_floating_point() ? x.to(dtype_) : x);
    loss.backward();
    for (size_t i = 0; i < masters.size(); ++i) {
      if (!copies[i].grad().defined()) continue;
      const auto mean = mean_of_all(copies[i].grad().to(reduce_dtype_, false, /*copy=*/true)).to(at::kFloat);
      auto& grad = masters[i].mutable_grad();
      grad = grad.defined() ? grad + mean : mean;
      copies[i].mutable_grad().reset();
    }
    return loss;
  }
  [[nodiscard]] std::vector<at::Tensor> parameters() const { return master_->parameters(); }

 private:
  [[nodiscard]] at::Tensor mean_of_all(const at::Tensor& grad) const {
    const bool divides_first = reduce_dtype_ == at::kHalf;  // the sum may be beyond fp16
    std::vector<at::Tensor> sum{divides_first ? grad / rank_.size() : grad};
    rank_.group->allreduce(sum)->wait();
    return divides_first ? sum[0] : sum[0] / rank_.size();
  }
  RankContext rank_;
  std::shared_ptr<TestNet> master_, compute_;
  at::ScalarType dtype_, reduce_dtype_;
};

TEST(MixedPrecision, TrainsAsAMasterCopyDoes) {  // behaviours 69
  for (const int size : {1, 2, 3, 4}) {
    run_on_ranks(size, [](const RankContext& rank) {
      Twins twins(rank, net_of<Mlp>(), {.shard = false});
      shard_units(*twins.sharded, {.mesh = rank.mesh, .mp_policy = kMixed});
      Reference reference(net_of<Mlp>(), rank);
      torch::optim::Adam own(twins.q, 1e-2), plain(reference.parameters(), 1e-2);
      for (int step = 0; step < 5; ++step) {
        twins.next_batch();
        const auto loss = twins.sharded->loss(twins.part);
        loss.backward();
        EXPECT_EQ(loss.item<float>(), reference.backward(twins.part).item<float>()) << "step " << step;
        EXPECT_LE(difference(grads(reference.parameters()), grads(twins.q)), kClose);
        own.step();
        plain.step();
        own.zero_grad();
        plain.zero_grad();
      }
      EXPECT_LE(difference(reference.parameters(), twins.q), kClose);
      for (const auto& parameter : twins.q) EXPECT_EQ(parameter.scalar_type(), at::kFloat);
    });
  }
}

struct DtypeCase {
  MixedPrecisionPolicy policy;
  at::ScalarType reduced;
};

TEST(MixedPrecision, ReducesInTheDtypeAskedFor) {  // behaviours 69, 71, 72
  const std::vector<DtypeCase> cases{{{.param_dtype = at::kBFloat16}, at::kBFloat16},
                                     {{.param_dtype = at::kHalf}, at::kHalf},
                                     {{.reduce_dtype = at::kBFloat16}, at::kBFloat16},
                                     {{.reduce_dtype = at::kHalf}, at::kHalf}};
  for (const auto& test : cases) {
    for (const bool reshard : {true, false}) {
      run_on_ranks(2, [&](const RankContext& rank) {
        Twins twins(on_counting_group(rank), net_of<Mlp>(), {.shard = false});
        shard_units(*twins.sharded,
                    {.mesh = twins.rank.mesh, .reshard_after_forward = reshard, .mp_policy = test.policy});
        Reference reference(net_of<Mlp>(), rank, test.policy);
        torch::optim::Adam own(twins.q, 1e-2), plain(reference.parameters(), 1e-2);
        for (int step = 0; step < 10; ++step) {
          const auto loss = twins.sharded->loss(twins.part);
          loss.backward();
          EXPECT_NEAR(loss.item<float>(), reference.backward(twins.part).item<float>(), 1e-3) << "step " << step;
          EXPECT_LE(own_difference(grads(reference.parameters()), grads(twins.q)), 1e-3) << "step " << step;
          EXPECT_TRUE(whole(twins.q[0].grad()).isfinite().all().item<bool>());
          own.step();
          plain.step();
          own.zero_grad();
          plain.zero_grad();
          twins.next_batch();
        }
        EXPECT_EQ(counts_of(twins.rank.group).reduce_dtypes(), std::set<at::ScalarType>{test.reduced});
      });
    }
  }
}

// A policy that names the dtype that is there already asks for nothing.
TEST(MixedPrecision, OfTheParametersOwnDtypeCastsNothing) {  // behaviours 80
  const Ranges ranges;
  on_two_and_three([](const RankContext& rank) {
    std::vector<std::vector<at::Tensor>> results;
    std::vector<size_t> num_casts;
    for (const auto& policy : {MixedPrecisionPolicy{}, MixedPrecisionPolicy{at::kFloat, at::kFloat}}) {
      Twins twins(rank, square_mlp(), {.dtype = at::kDouble, .shard = false});
      twins.sharded->to(at::kFloat);
      shard_units(*twins.sharded, {.mesh = rank.mesh, .mp_policy = policy});
      const auto x = twins.part.to(at::kFloat);
      Ranges::forget_this_thread();
      twins.sharded->loss(x).backward();
      num_casts.push_back(Ranges::of_this_thread("aten::_to_copy").size());
      results.push_back(grads(twins.q));
    }
    EXPECT_EQ(num_casts[0], num_casts[1]);
    EXPECT_LE(difference(results[0], results[1]), 0);
  });
}

TEST(MixedPrecision, GathersHalfTheBytes) {
  run_on_ranks(2, [](const RankContext& rank) {
    const auto gathered_peak = [&](const MixedPrecisionPolicy& policy) {
      Twins twins(rank, square_mlp(), {.shard = false});
      shard_units(*twins.sharded, {.mesh = rank.mesh, .mp_policy = policy});
      twins.sharded->loss(twins.part).backward();
      EXPECT_EQ(twins.q[0].grad().scalar_type(), at::kFloat);
      return twins.stats().gathered.peak;
    };
    EXPECT_EQ(gathered_peak({}), 2 * gathered_peak(kMixed));
  });
}

TEST(MixedPrecision, GptTrains) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Gpt>(2), {.shard = false});
    shard_units(*twins.sharded, {.mesh = rank.mesh, .mp_policy = kMixed});
    torch::optim::AdamW own(twins.q, 1e-2), plain(twins.p, 1e-2);
    for (int step = 0; step < 5; ++step) {
      const auto p = twins.plain->loss(twins.joined), q = twins.sharded->loss(twins.part);
      EXPECT_NEAR(p.item<float>(), mean_over_ranks(q, rank.group), 0.05) << "step " << step;
      p.backward();
      q.backward();
      own.step();
      plain.step();
      twins.zero_grad();
    }
  });
}

TEST(MixedPrecision, ReadsOfValuesAreNotRounded) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp(), {.shard = false});
    shard_units(*twins.sharded, {.mesh = rank.mesh, .mp_policy = kMixed});
    EXPECT_SAME_PARAMETERS(twins, 0);
    const torch::NoGradGuard no_grad;
    const auto printed = [](const at::Tensor& tensor) {
      std::ostringstream out;
      out << std::hexfloat << tensor.norm().item<float>() << tensor;
      return out.str();
    };
    EXPECT_LE(difference(twins.p[0].norm(), twins.q[0].norm()), kClose);
    EXPECT_LE(difference(twins.p[0].select(0, 1), twins.q[0].select(0, 1)), 0);
    EXPECT_EQ(printed(twins.p[1]).substr(20), printed(twins.q[1]).substr(20));
    EXPECT_EQ(twins.p[0][1][2].item<float>(), twins.q[0][1][2].item<float>());
  });
}

TEST(MixedPrecision, WritesDoNotRoundTheRest) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp(), {.shard = false});
    shard_units(*twins.sharded, {.mesh = rank.mesh, .mp_policy = kMixed});
    const torch::NoGradGuard no_grad;
    twins.both([](TestNet& net, const at::Tensor& x) {
      (void)net.forward(x);  // the copies for compute are there
      auto w = net.parameters()[0];
      w[1].fill_(0.3);
      w.narrow(0, 2, 3).mul_(1.1);
      w.index_put_({torch::tensor({0, 5})}, torch::full({8}, 0.7));
      net.parameters()[1].add_(0.1);
    });
    EXPECT_SAME_PARAMETERS(twins, kClose);
    const auto view = twins.q[0].t();  // made for compute
    EXPECT_CONTAINS(error_of<c10::NotImplementedError>([&] { view.mul_(2); }), "would round");
  });
}

TEST(MixedPrecision, AveragesOfWeightsAreNotRounded) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp(), {.shard = false});
    shard_units(*twins.sharded, {.mesh = rank.mesh, .mp_policy = kMixed});
    const torch::NoGradGuard no_grad;
    twins.both([](TestNet& net, const at::Tensor& x) { (void)net.forward(x); });
    std::vector<at::Tensor> results;
    twins.both([&](TestNet& net, const at::Tensor&) {
      const auto w = net.parameters()[0];
      auto copied = torch::zeros_like(w).to(at::kFloat).new_zeros({16, 8});
      copied.copy_(w);
      auto added = torch::ones({16, 8});
      added.add_(w);
      auto blended = torch::ones({16, 8});
      blended.lerp_(w, 0.1);
      const auto averaged = 0.9 * torch::ones({16, 8}) + 0.1 * w.detach();
      for (const auto& t : {copied, added, blended, averaged}) results.push_back(t);
    });
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(results[4 + i].scalar_type(), at::kFloat) << i;
      EXPECT_LE(difference(results[i], results[4 + i]), kClose) << i;
    }
    EXPECT_TRUE(torch::allclose(twins.q[0], twins.p[0], 0, 0));
  });
}

TEST(MixedPrecision, PointwiseOpsWithAParameterFollowIt) {
  run_on_ranks(2, [](const RankContext& rank) {
    struct Scale : torch::nn::Module {
      Scale() { weight = register_parameter("weight", torch::full({8}, 1.001)); }
      at::Tensor weight;
    };
    Scale net;
    fully_shard(net, {.mesh = rank.mesh, .mp_policy = kMixed});
    const auto x = torch::rand({4, 8});
    const auto with_grad = x * net.weight;
    const torch::NoGradGuard no_grad;
    const auto without = x * net.weight;
    EXPECT_EQ(with_grad.scalar_type(), at::kBFloat16);
    EXPECT_EQ(without.scalar_type(), at::kBFloat16) << "evaluation computes as training does";
    EXPECT_LE(difference(with_grad.detach(), without), 0);
    EXPECT_EQ((net.weight * 2).scalar_type(), at::kFloat) << "parameters alone";
  });
}

TEST(MixedPrecision, ExplicitDtypeAsksForTheMaster) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp(), {.shard = false});
    shard_units(*twins.sharded, {.mesh = rank.mesh, .mp_policy = kMixed});
    twins.both([](TestNet& net, const at::Tensor& x) {
      const auto w = net.parameters()[0].to(at::kFloat);
      x.matmul(w.t()).square().mean().backward();
    });
    EXPECT_LE(difference(twins.p[0].grad(), twins.q[0].grad()), kClose);
  });
}

TEST(MixedPrecision, BatchNormKeepsItsStatisticsAndAffine) {  // behaviours 79
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::Sequential net(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3).bias(false)),
                              torch::nn::BatchNorm2d(4), torch::nn::ReLU());
    fill_parameters(*net, 3);
    fully_shard(net, {.mesh = rank.mesh, .mp_policy = kMixed});
    const auto& norm = *net->ptr(1)->as<torch::nn::BatchNorm2dImpl>();
    {
      const torch::NoGradGuard no_grad;
      net->ptr(1)->as<torch::nn::BatchNorm2dImpl>()->weight.fill_(1.001);
    }
    const auto out = net->forward(torch::ones({2, 3, 6, 6}) * torch::arange(6));
    out.sum().backward();
    EXPECT_EQ(out.scalar_type(), at::kBFloat16);
    EXPECT_EQ(norm.running_mean.scalar_type(), at::kFloat);
    EXPECT_GT(norm.running_mean.abs().sum().item<float>(), 0);
    EXPECT_EQ(norm.weight.grad().scalar_type(), at::kFloat);
  });
}

TEST(MixedPrecision, EvaluationWithViewsOfWeightsEqualsTraining) {
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::TransformerDecoderLayer net(
        torch::nn::TransformerDecoderLayerOptions(/*d_model=*/8, /*nhead=*/2).dim_feedforward(16).dropout(0.0));
    fill_parameters(*net, 3);
    fully_shard(net, {.mesh = rank.mesh, .mp_policy = kMixed});
    const auto x = torch::rand({3, 2, 8}), memory = torch::rand({4, 2, 8});
    const auto trained = net->forward(x, memory).detach();
    const torch::NoGradGuard no_grad;
    const auto evaluated = net->forward(x, memory);
    EXPECT_EQ(evaluated.scalar_type(), trained.scalar_type());
    EXPECT_LE(difference(trained, evaluated), 0);
  });
}

TEST(MixedPrecision, InstanceNormKeepsItsAffine) {
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::InstanceNorm2d net(torch::nn::InstanceNorm2dOptions(3).affine(true).track_running_stats(true));
    fill_parameters(*net, 3);
    fully_shard(net, {.mesh = rank.mesh, .mp_policy = kMixed});
    net->forward(torch::rand({2, 3, 4, 4})).sum().backward();
    net->forward(torch::rand({2, 3, 4, 4}).to(at::kBFloat16)).sum().backward();
    EXPECT_EQ(net->weight.grad().scalar_type(), at::kFloat);
  });
}

TEST(MixedPrecision, CastForwardInputsFalse) {  // behaviours 77
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::Linear net(4, 4);
    fill_parameters(*net, 1);
    fully_shard(net, {.mesh = rank.mesh, .mp_policy = {.param_dtype = at::kBFloat16, .cast_forward_inputs = false}});
    EXPECT_NE(error_of([&] { (void)net->forward(torch::ones({2, 4})); }), "") << "LibTorch's own complaint";
    EXPECT_EQ(net->forward(torch::ones({2, 4}, at::kBFloat16)).scalar_type(), at::kBFloat16);
  });
}

TEST(MixedPrecision, CallCastsAtTheBoundary) {  // behaviours 81
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
    fill_parameters(*net, 1);
    auto policy = kMixed;
    policy.output_dtype = at::kFloat;
    fully_shard(net, {.mesh = rank.mesh, .mp_policy = policy});
    EXPECT_EQ(net->forward(torch::ones({2, 4})).scalar_type(), at::kBFloat16);
    auto& first = *net->ptr(0)->as<torch::nn::LinearImpl>();
    EXPECT_CONTAINS(error_of<c10::ValueError>([&] { (void)fsdp::call(first, torch::ones({2, 4})); }), "not wrapped");

    struct Pair : torch::nn::Module {
      Pair() { register_module("layer", layer); }
      std::tuple<at::Tensor, std::vector<at::Tensor>, int> forward(const at::Tensor& x, int n) {
        const auto y = layer->forward(x);
        return {y, {y, x}, n};
      }
      torch::nn::Linear layer{4, 4};
    };
    Pair pair;
    fill_parameters(pair, 2);
    fully_shard(pair, {.mesh = rank.mesh, .mp_policy = policy});
    const auto [y, list, n] = fsdp::call(pair, torch::ones({2, 4}), 7);
    EXPECT_EQ(y.scalar_type(), at::kFloat);
    EXPECT_EQ(list[1].scalar_type(), at::kFloat);
    EXPECT_EQ(n, 7);
    EXPECT_TRUE(y.requires_grad());
  });
}

TEST(MixedPrecision, UnsyncedGradientsAddUpInReduceDtype) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp(), {.shard = false});
    shard_units(*twins.sharded, {.mesh = rank.mesh, .mp_policy = kMixed});
    Reference reference(square_mlp(), rank);
    auto root = FSDPModule::of(*twins.sharded);
    for (int i = 0; i < 3; ++i) {
      twins.next_batch();
      root.set_requires_gradient_sync(i == 2);
      twins.sharded->loss(twins.part).backward();
      (void)reference.backward(twins.part);
    }
    EXPECT_LE(difference(grads(reference.parameters()), grads(twins.q)), kClose);
  });
}

}  // namespace
}  // namespace fsdp::testing
