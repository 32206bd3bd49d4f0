// Clipping of sharded gradients: the global norm, as a plain scalar, by one all-reduce a mesh dim.
#include <torch/nn/utils/clip_grad.h>

#include "support/counting_backend.h"
#include "support/parity.h"

namespace fsdp::testing {
namespace {

using torch::nn::utils::clip_grad_norm_;
using torch::nn::utils::clip_grad_value_;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// a: 4 elements, b: 2 elements, both sharded, with gradients [3, 0, 0, 4] and [0, 12].
struct TwoVectors : torch::nn::Module {
  TwoVectors() {
    a = register_parameter("a", torch::zeros({4}));
    b = register_parameter("b", torch::zeros({2}));
  }
  void set_gradients() {
    (a * torch::tensor({3.F, 0.F, 0.F, 4.F})).sum().backward();
    (b * torch::tensor({0.F, 12.F})).sum().backward();
  }
  at::Tensor a, b;
};

TEST(Clip, NormOfAllShards) {  // R04
  for (int size : {1, 2, 3, 4}) {
    run_on_ranks(size, [](const RankContext& rank) {
      TwoVectors net;
      fully_shard(net, {.mesh = rank.mesh});
      net.set_gradients();
      const std::vector<at::Tensor> all{net.a, net.b};
      EXPECT_NEAR(clip_grad_norm_(all, 100), 13.0, 1e-5);
      EXPECT_LE(difference(torch::tensor({3.F, 0.F, 0.F, 4.F}), net.a.grad()), 0) << "bit-unchanged";
      EXPECT_NEAR(clip_grad_norm_(all, 100, kInfinity), 12.0, 1e-5);
      EXPECT_NEAR(clip_grad_norm_(all, 100, 1.0), 19.0, 1e-5);
      EXPECT_NEAR(clip_grad_norm_(all, 1.3), 13.0, 1e-5);
      EXPECT_LE(difference(torch::tensor({.3F, 0.F, 0.F, .4F}), net.a.grad()), 1e-6);
      EXPECT_LE(difference(torch::tensor({0.F, 1.2F}), net.b.grad()), 1e-6);
    });
  }
}

TEST(Clip, ReplicatedGradientsCountOnce) {  // R04
  run_on_ranks(2, [](const RankContext& rank) {
    TwoVectors net;
    fully_shard(net, {.mesh = rank.mesh});
    net.set_gradients();
    auto c = torch::zeros({1}, torch::requires_grad());
    c.mutable_grad() = torch::tensor({84.F});
    EXPECT_NEAR(clip_grad_norm_(std::vector<at::Tensor>{net.a, net.b, c}, 1000), 85.0, 1e-4);
  });
}

TEST(Clip, ByValue) {
  run_on_ranks(3, [](const RankContext& rank) {
    TwoVectors net;
    fully_shard(net, {.mesh = rank.mesh});
    net.set_gradients();
    clip_grad_value_({net.a, net.b}, 3.5);
    EXPECT_LE(difference(torch::tensor({3.F, 0.F, 0.F, 3.5F}), net.a.grad()), 0);
    EXPECT_LE(difference(torch::tensor({0.F, 3.5F}), net.b.grad()), 0);
  });
}

TEST(Clip, EdgeCases) {  // behaviours 141
  run_on_ranks(2, [](const RankContext& rank) {
    TwoVectors net;
    fully_shard(net, {.mesh = rank.mesh});
    const std::vector<at::Tensor> all{net.a, net.b};
    EXPECT_EQ(clip_grad_norm_(all, 1.0), 0.0) << "no gradients";
    (net.b * torch::tensor({0.F, 12.F})).sum().backward();
    EXPECT_NEAR(clip_grad_norm_(all, 100), 12.0, 1e-5) << "one has none";
    net.zero_grad();
    (net.a * torch::tensor({1.F, 0.F, 0.F, std::numeric_limits<float>::infinity()})).sum().backward();
    (net.b * torch::tensor({0.F, 12.F})).sum().backward();
    const auto before = whole(net.b.grad());
    EXPECT_THROW(clip_grad_norm_(all, 1.0, 2.0, /*error_if_nonfinite=*/true), c10::Error);
    EXPECT_LE(difference(before, net.b.grad()), 0) << "untouched";
    EXPECT_EQ(clip_grad_norm_(all, 1.0), kInfinity);
    EXPECT_LE(difference(torch::zeros({2}), net.b.grad()), 0) << "12 / inf";
  });
}

TEST(Clip, UnderAnOffloadPolicy) {  // behaviours 142
  run_on_ranks(2, [](const RankContext& rank) {
    TwoVectors net;
    fully_shard(net, {.mesh = rank.mesh, .offload_policy = CPUOffloadPolicy{}});
    net.set_gradients();
    EXPECT_NEAR(clip_grad_norm_(std::vector<at::Tensor>{net.a, net.b}, 1.3), 13.0, 1e-5);
    EXPECT_LE(difference(torch::tensor({.3F, 0.F, 0.F, .4F}), net.a.grad()), 1e-6);
  });
}

TEST(Clip, TrainingWithClippingMatchesOneProcess) {
  for (int size : {1, 2, 3, 4}) {
    run_on_ranks(size, [](const RankContext& rank) {
      for (double norm_type : {2.0, 1.0, 3.0, kInfinity}) {
        Twins twins(rank, net_of<Mlp>());
        expect_same_training(twins, {.num_steps = 4, .before_update = [&](const std::vector<at::Tensor>& parameters) {
                                       clip_grad_norm_(parameters, 0.05, norm_type);
                                     }});
      }
    });
  }
}

TEST(Clip, OneAllReduceWhateverTheNumberOfParameters) {
  run_on_ranks(2, [](const RankContext& rank) {
    RankContext counted = rank;
    counted.group = make_counting_group(rank.store, rank.rank(), rank.size());
    counted.mesh = DeviceMesh::from_group(counted.group, torch::kCPU, {"dp"});
    auto& counts = counts_of(counted.group);
    Twins twins(counted, net_of<Blocks>());
    twins.backward();
    EXPECT_SAME_GRADS(twins, kClose);
    for (double norm_type : {2.0, 1.0, kInfinity}) {
      const auto before = counts.num_collectives(), all_reduces_before = counts.num_all_reduces();
      const auto norm = clip_grad_norm_(twins.q, 0.1, norm_type);
      EXPECT_EQ(counts.num_all_reduces() - all_reduces_before, 1) << norm_type;
      EXPECT_EQ(counts.num_collectives() - before, 1) << norm_type;
      EXPECT_NEAR(norm, clip_grad_norm_(twins.p, 0.1, norm_type), 1e-5);
    }
  });
}

TEST(Clip, OneAllReduceADimOverTwoMeshDims) {  // behaviours 140
  run_on_ranks(4, [](const RankContext& rank) {
    const auto row = rank.rank() / 2, column = rank.rank() % 2;
    const auto group = [&](const std::string& name, int place) {
      return make_counting_group(c10::make_intrusive<c10d::PrefixStore>(name, rank.store), place, 2);
    };
    const auto replicate = group("column" + std::to_string(column), row);
    const auto shard = group("row" + std::to_string(row), column);
    RankContext counted = rank;
    counted.mesh =
        DeviceMesh::from_group({replicate, shard}, torch::kCPU, torch::arange(4).view({2, 2}), {"replicate", "shard"});
    Twins twins(counted, net_of<Mlp>());
    twins.backward();
    EXPECT_SAME_GRADS(twins, kClose);
    const auto shard_before = counts_of(shard).num_all_reduces(),
               replicate_before = counts_of(replicate).num_all_reduces();
    const auto norm = clip_grad_norm_(twins.q, 0.1);
    EXPECT_EQ(counts_of(shard).num_all_reduces() - shard_before, 1);
    EXPECT_EQ(counts_of(replicate).num_all_reduces() - replicate_before, 0) << "replicas are not counted twice";
    EXPECT_NEAR(norm, clip_grad_norm_(twins.p, 0.1), 1e-5);
  });
}

}  // namespace
}  // namespace fsdp::testing
