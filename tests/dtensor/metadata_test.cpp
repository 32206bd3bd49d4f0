// What the shape alone answers is answered without communication; what would break the sharding is refused.
#include "support/parity.h"

namespace fsdp::testing {
namespace {

using Use = std::function<void(const at::Tensor&)>;

struct NamedUse {
  const char* name;
  Use use;
};

std::vector<NamedUse> metadata_uses() {
  const auto shape_is = [](const at::Tensor& t) { EXPECT_EQ(t.sizes(), (at::IntArrayRef{16, 16})); };
  return {
      {"is_same_size", [](const at::Tensor& p) { EXPECT_TRUE(p.is_same_size(p)); }},
      {"view_as", [=](const at::Tensor& p) { shape_is(torch::zeros({256}).view_as(p)); }},
      {"expand_as",
       [=](const at::Tensor& p) {
         shape_is(torch::zeros({1, 16}).expand_as(p));
       }},
      {"reshape_as", [=](const at::Tensor& p) { shape_is(torch::zeros({256}).reshape_as(p)); }},
      {"to_same_dtype", [](const at::Tensor& p) { EXPECT_TRUE(p.to(torch::kFloat).is_same(p)); }},
      {"to_same_device", [](const at::Tensor& p) { EXPECT_TRUE(p.to(torch::kCPU).is_same(p)); }},
      {"type_as",
       [](const at::Tensor& p) {
         EXPECT_EQ(torch::zeros({1}, torch::kDouble).type_as(p).scalar_type(), torch::kFloat);
       }},
      {"zeros_like", [=](const at::Tensor& p) { shape_is(at::zeros_like(p)); }},
      {"ones_like", [=](const at::Tensor& p) { shape_is(at::ones_like(p)); }},
      {"empty_like", [=](const at::Tensor& p) { shape_is(at::empty_like(p)); }},
      {"full_like", [=](const at::Tensor& p) { shape_is(at::full_like(p, 2)); }},
      {"rand_like", [=](const at::Tensor& p) { shape_is(at::rand_like(p)); }},
      {"new_zeros", [](const at::Tensor& p) { EXPECT_EQ(p.new_zeros({3}).sizes(), at::IntArrayRef{3}); }},
      {"new_empty", [](const at::Tensor& p) { EXPECT_EQ(p.new_empty({3}).sizes(), at::IntArrayRef{3}); }},
      {"contiguous", [](const at::Tensor& p) { EXPECT_TRUE(p.contiguous().is_same(p)); }},
      {"is_contiguous", [](const at::Tensor& p) { EXPECT_TRUE(p.is_contiguous()); }},
      {"result_type", [](const at::Tensor& p) { EXPECT_EQ(at::result_type(p, p), torch::kFloat); }},
      {"is_pinned", [](const at::Tensor& p) { EXPECT_FALSE(p.is_pinned()); }},
      {"sizes",
       [=](const at::Tensor& p) {
         shape_is(p);
         EXPECT_EQ(p.size(0), 16);
         EXPECT_EQ(p.numel(), 256);
         EXPECT_EQ(p.dim(), 2);
         EXPECT_EQ(p.sym_sizes().size(), 2u);
         EXPECT_EQ(p.strides(), (at::IntArrayRef{16, 1}));
       }},
      {"options", [](const at::Tensor& p) { EXPECT_EQ(p.options().dtype(), torch::kFloat); }},
      {"toString", [](const at::Tensor& p) { EXPECT_FALSE(p.toString().empty()); }},
      {"version", [](const at::Tensor& p) { EXPECT_GE(p._version(), 0); }},
      {"is_leaf", [](const at::Tensor& p) { EXPECT_TRUE(p.is_leaf()); }},
      {"retain_grad", [](const at::Tensor& p) { p.retain_grad(); }},
      {"requires_grad_",
       [](const at::Tensor& p) {
         p.requires_grad_(false);
         EXPECT_FALSE(p.requires_grad());
         p.requires_grad_(true);
         EXPECT_TRUE(p.requires_grad());
       }},
      {"detach", [=](const at::Tensor& p) { shape_is(p.detach()); }},
      {"data", [=](const at::Tensor& p) { shape_is(p.data()); }},
      {"variable_data", [=](const at::Tensor& p) { shape_is(p.variable_data()); }},
      {"to_local", [](const at::Tensor& p) { EXPECT_EQ(DTensor(p).to_local().size(1), 16); }},
  };
}

class Metadata : public ::testing::TestWithParam<size_t> {};

TEST_P(Metadata, IsAnsweredWithoutAGather) {
  const auto use = metadata_uses()[GetParam()].use;
  run_on_ranks(2, [&](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    for (bool grad_mode : {true, false}) {
      const torch::AutoGradMode mode(grad_mode);
      const auto before = twins.stats();
      use(twins.q[2]);
      EXPECT_EQ(twins.stats().num_all_gathers, before.num_all_gathers) << "grad mode " << grad_mode;
      EXPECT_EQ(twins.stats().num_meetings, before.num_meetings) << "grad mode " << grad_mode;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(AllKinds, Metadata, ::testing::Range(size_t{0}, metadata_uses().size()),
                         [](const auto& info) { return metadata_uses()[info.param].name; });

// No gather either: own rows are enough.
TEST(ShardByShard, PointwiseWorkNeedsNoGather) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    twins.backward();
    const torch::NoGradGuard no_grad;
    const auto before = twins.stats();
    std::vector<at::Tensor> results;
    twins.both([&](TestNet& net, const at::Tensor&) {
      auto p = net.parameters()[2];
      p.mul_(0.5);
      p.add_(p.grad(), -0.1);
      p.addcmul_(p.grad(), p.grad(), 0.5);
      p.addcdiv_(p.grad(), p.grad().square() + 1, -0.1);
      results.push_back((p * 2 + p.grad()).sqrt_().nan_to_num_());
      results.push_back(at::max(p, p.grad()));
      results.push_back(p.grad().abs().sign());
      results.push_back(p > 0);
      results.push_back(at::where(p > 0, p, p.grad()));
    });
    EXPECT_EQ(twins.stats().num_all_gathers, before.num_all_gathers);
    const size_t half = results.size() / 2;
    for (size_t i = 0; i < half; ++i) {
      EXPECT_TRUE(DTensor::is(results[half + i])) << i;
      EXPECT_LE(difference(results[i], results[half + i]), 1e-6) << i;
    }
    EXPECT_SAME_PARAMETERS(twins, 1e-6);
  });
}

std::vector<NamedUse> refused_uses() {
  return {
      {"t_", [](const at::Tensor& p) { p.detach().t_(); }},
      {"transpose_", [](const at::Tensor& p) { p.detach().transpose_(0, 1); }},
      {"squeeze_", [](const at::Tensor& p) { p.detach().squeeze_(); }},
      {"unsqueeze_", [](const at::Tensor& p) { p.detach().unsqueeze_(0); }},
      {"resize_", [](const at::Tensor& p) { p.detach().resize_({3}); }},
      {"as_strided_", [](const at::Tensor& p) { p.detach().as_strided_({4}, {1}); }},
      {"swapaxes_", [](const at::Tensor& p) { p.detach().swapaxes_(0, 1); }},
  };
}

class Refused : public ::testing::TestWithParam<size_t> {};

TEST_P(Refused, MetadataInPlaceOps) {
  const auto use = refused_uses()[GetParam()].use;
  run_on_ranks(2, [&](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    const torch::NoGradGuard no_grad;
    EXPECT_THROW(use(twins.q[2]), c10::Error);
    EXPECT_EQ(twins.q[2].sizes(), (at::IntArrayRef{16, 16}));
    EXPECT_SAME_PARAMETERS(twins, 0);
  });
}

INSTANTIATE_TEST_SUITE_P(AllKinds, Refused, ::testing::Range(size_t{0}, refused_uses().size()),
                         [](const auto& info) { return refused_uses()[info.param].name; });

TEST(Refused, CollectivesOnShardedTensors) {
  run_on_ranks(2, [&](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    const torch::NoGradGuard no_grad;
    std::vector<at::Tensor> tensors{twins.q[0]};
    EXPECT_THROW(rank.group->allreduce(tensors)->wait(), c10::Error);
    EXPECT_THROW(rank.group->broadcast(tensors)->wait(), c10::Error);
    EXPECT_SAME_PARAMETERS(twins, 0);
  });
}

TEST(Refused, CopyOfAShardedModule) {
  run_on_ranks(2, [&](const RankContext& rank) {
    torch::nn::Linear linear(4, 4);
    fill_parameters(*linear, 1);
    fully_shard(*linear, {.mesh = rank.mesh});
    EXPECT_NE(error_of([&] { linear->clone(); }), "");
    EXPECT_TRUE(DTensor::is(linear->weight));
  });
}

TEST(Refused, SaveOfAShardedModuleNamesTheWayOut) {
  run_on_ranks(2, [&](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    std::stringstream file;
    const auto message = error_of([&] {
      torch::serialize::OutputArchive archive;
      twins.sharded->save(archive);
      archive.save_to(file);
    });
    EXPECT_CONTAINS(message, "full_state_dict");
  });
}

TEST(Refused, RawMemoryOfAShardedTensor) {
  run_on_ranks(2, [&](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    for (const auto& message :
         {error_of([&] { twins.q[0].data_ptr(); }), error_of([&] { twins.q[0].mutable_data_ptr<float>(); }),
          error_of([&] { twins.q[0].accessor<float, 2>(); })}) {
      EXPECT_CONTAINS(message, "to_local");
    }
  });
}

TEST(Refused, RawMemoryOfAViewAfterReshard) {
  run_on_ranks(2, [&](const RankContext& rank) {
    torch::nn::Linear linear(4, 4);
    fill_parameters(*linear, 1);
    auto handle = fully_shard(*linear, {.mesh = rank.mesh});
    const torch::NoGradGuard no_grad;
    const auto view = linear->weight.t();
    handle.reshard();
    EXPECT_NE(error_of([&] { view.data_ptr<float>(); }), "");
    EXPECT_NE(error_of([&] { view.accessor<float, 2>(); }), "");
  });
}

TEST(Refused, InferenceTensorsAndWrappingInInferenceMode) {
  run_on_ranks(2, [&](const RankContext& rank) {
    std::shared_ptr<TestNet> born_there;
    {
      const c10::InferenceMode inference;
      born_there = square_mlp()();
    }
    EXPECT_CONTAINS(error_of([&] { fully_shard(*born_there, {.mesh = rank.mesh}); }), "nference");
    // Wrapping inside is refused, or works as outside.
    Twins twins(rank, square_mlp(), {.shard = false});
    const auto message = error_of([&] {
      const c10::InferenceMode inference;
      shard_units(*twins.sharded, rank.mesh);
    });
    if (!message.empty()) {
      EXPECT_CONTAINS(message, "nference");
      return;
    }
    twins.backward();
    EXPECT_SAME_GRADS(twins, 1e-6);
  });
}

}  // namespace
}  // namespace fsdp::testing
