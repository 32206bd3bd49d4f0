// Where parameters are cut, over which mesh, and which are left alone.
#include "support/parity.h"

namespace fsdp::testing {
namespace {

std::optional<ShardPlacementResult> largest_dim(const std::string&, const at::Tensor& parameter) {
  const auto sizes = parameter.sizes();
  const auto dim = std::max_element(sizes.begin(), sizes.end()) - sizes.begin();
  return ShardPlacementResult{Shard{static_cast<int64_t>(dim)}};
}

TEST(PlacementFn, LargestDimTrainsAlike) {  // behaviours 8, 24, 102
  for (const int size : {1, 2, 4}) {
    run_on_ranks(size, [](const RankContext& rank) {
      Twins twins(rank, net_of<Mlp>(8, 4, 16, 4), {.shard = false});
      shard_units(*twins.sharded, {.mesh = rank.mesh, .shard_placement_fn = largest_dim});
      EXPECT_EQ(DTensor(twins.q[0]).placements(), Placements{Shard{1}}) << "[4, 8]";
      EXPECT_EQ(DTensor(twins.q[2]).placements(), Placements{Shard{0}}) << "[16, 4]";
      EXPECT_EQ(DTensor(twins.q[0]).to_local().sizes(), (at::IntArrayRef{4, 8 / rank.size()}));
      EXPECT_SAME_PARAMETERS(twins, 0);
      expect_same_training(twins, {.num_steps = 5, .optimizer = [](std::vector<at::Tensor> parameters) {
                                     return std::make_unique<torch::optim::AdamW>(std::move(parameters), 1e-2);
                                   }});
    });
  }
}

TEST(PlacementFn, NegativeDimsAndWritesAndOldGradients) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>(8, 4, 16, 4), {.shard = false});
    twins.plain->loss(twins.joined).backward();
    twins.sharded->loss(twins.joined).backward();
    shard_units(*twins.sharded, {.mesh = rank.mesh, .shard_placement_fn = [](const std::string&, const at::Tensor&) {
                                   return ShardPlacementResult{Shard{-1}};
                                 }});
    EXPECT_EQ(DTensor(twins.q[0]).placements(), Placements{Shard{1}});
    twins.backward();
    EXPECT_SAME_GRADS(twins, kClose);
    const torch::NoGradGuard no_grad;
    twins.both([](TestNet& net, const at::Tensor&) {
      auto w = net.parameters()[0];
      w[1].fill_(0.3);
      w.select(1, 5).mul_(2);
      w.t().add_(0.5);
    });
    EXPECT_SAME_PARAMETERS(twins, kClose);
  });
}

TEST(PlacementFn, WidestDtypeOnAnotherDimThanTheFirst) {
  run_on_ranks(2, [](const RankContext& rank) {
    const auto values = torch::complex(torch::arange(12.0, at::kDouble), torch::arange(12.0, at::kDouble) * 2);
    torch::nn::Module net;
    const auto weight = net.register_parameter("weight", values.view({3, 4}).clone());
    fully_shard(net, {.mesh = rank.mesh, .shard_placement_fn = [](const std::string&, const at::Tensor&) {
                        return ShardPlacementResult{Shard{1}};
                      }});
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(torch::equal(torch::mm(torch::eye(3, at::kComplexDouble), weight).view({-1}), values));
  });
}

TEST(PlacementFn, Misuse) {
  run_on_ranks(2, [](const RankContext& rank) {
    const auto shard_on_1 = [](const std::string&, const at::Tensor&) { return ShardPlacementResult{Shard{1}}; };
    torch::nn::Linear net(17, 8);
    fill_parameters(*net, 1);
    const auto uneven = error_of<c10::NotImplementedError>([&] {
      fully_shard(net, {.mesh = rank.mesh, .shard_placement_fn = shard_on_1, .ignored_params = {net->bias}});
    });
    EXPECT_CONTAINS(uneven, "dim 1 of 'weight'");
    torch::nn::Linear other(16, 8);
    fill_parameters(*other, 1);
    EXPECT_CONTAINS(error_of([&] { fully_shard(other, {.mesh = rank.mesh, .shard_placement_fn = shard_on_1}); }),
                    "Shard dim 1 is invalid for 1D tensor 'bias'");
    EXPECT_FALSE(DTensor::is(other->weight)) << "nothing was touched";
  });
}

TEST(PlacementFn, MeshOfItsOwnForExperts) {
  run_on_ranks(4, [](const RankContext& rank) {
    Twins twins(rank, square_mlp(), {.shard = false});
    const auto experts = mesh_2d(rank, 2, 2, "experts", {"pipeline", "expert"})["expert"];  // ranks {0, 1} and {2, 3}
    fully_shard(
        *twins.sharded,
        {.mesh = rank.mesh, .shard_placement_fn = [&](const std::string& path, const at::Tensor&) {
           return path.starts_with("layers.2.") ? std::optional(ShardPlacementResult{Shard{0}, experts}) : std::nullopt;
         }});
    EXPECT_EQ(DTensor(twins.q[2]).device_mesh(), experts);
    EXPECT_EQ(DTensor(twins.q[0]).device_mesh(), rank.mesh);
    twins.backward();
    for (const int i : {0, 1, 4, 5}) EXPECT_LE(difference(twins.p[i].grad(), twins.q[i].grad()), kClose) << i;
    // The expert's gradients are means over its own mesh.
    twins.plain->zero_grad();
    const auto pair = twins.joined.narrow(0, rank.rank() / 2 * 2 * twins.part.size(0), 2 * twins.part.size(0));
    twins.plain->loss(pair).backward();
    for (const int i : {2, 3}) EXPECT_LE(difference(twins.p[i].grad(), twins.q[i].grad()), kClose) << i;
    EXPECT_CONTAINS(error_of<c10::ValueError>(
                        [&] { FSDPModule::of(*twins.sharded).set_all_reduce_hook([](const at::Tensor&) {}); }),
                    "2 parameter groups");
  });
}

TEST(IgnoredParams, StayPlainAndLocal) {  // behaviours 83
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp(), {.shard = false});
    const auto ignored = twins.q[2];
    shard_units(*twins.sharded, {.mesh = rank.mesh, .ignored_params = {ignored}});
    EXPECT_TRUE(ignored.is_same(twins.sharded->parameters()[2]));
    EXPECT_FALSE(DTensor::is(ignored));
    twins.backward();
    for (const int i : {0, 1, 3, 4, 5}) EXPECT_LE(difference(twins.p[i].grad(), twins.q[i].grad()), kClose) << i;
    twins.plain->zero_grad();
    twins.plain->loss(twins.part).backward();
    EXPECT_LE(difference(twins.p[2].grad(), ignored.grad()), kClose) << "of this rank's part only";
  });
}

TEST(ReplicateBelow, KeepsTinyParametersWhole) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp(), {.shard = false});
    shard_units(*twins.sharded, {.mesh = rank.mesh, .replicate_below = 17});
    EXPECT_EQ(DTensor(twins.q[1]).to_local().numel(), 16) << "a bias, whole";
    EXPECT_LT(DTensor(twins.q[0]).to_local().numel(), 16 * 8) << "a weight, cut";
    expect_same_training(twins, {.num_steps = 4, .before_update = [](const std::vector<at::Tensor>& parameters) {
                                   torch::nn::utils::clip_grad_norm_(parameters, 0.5);
                                 }});
  });
}

TEST(ListOfModules, IsOneGroup) {  // behaviours 57
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>(), {.shard = false});
    auto& layers = *Twins::as<Mlp>(*twins.sharded).layers;
    auto pair = fully_shard({layers.ptr(0), layers.ptr(2)}, {.mesh = rank.mesh});
    fully_shard(*twins.sharded, {.mesh = rank.mesh});
    EXPECT_TRUE(is_fsdp(*layers.ptr(0)));
    EXPECT_TRUE(is_fsdp(*layers.ptr(2)));
    EXPECT_FALSE(is_fsdp(*layers.ptr(4)));
    pair.unshard();
    EXPECT_EQ(twins.stats().num_all_gathers, 1);
    pair.reshard();
    expect_same_training(twins, {.num_steps = 4});
    EXPECT_CONTAINS(error_of([&] {
                      fully_shard({layers.ptr(2), layers.ptr(4)}, {.mesh = rank.mesh});
                    }),
                    "wrapped before");
    EXPECT_CONTAINS(error_of<c10::ValueError>(
                        [&] { fully_shard(std::vector<std::shared_ptr<torch::nn::Module>>{}, {.mesh = rank.mesh}); }),
                    "empty");
  });
}

TEST(Offload, SaysOnTheCpuThatItHasNothingToDo) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp(), {.shard = false});
    shard_units(*twins.sharded, {.mesh = rank.mesh, .offload_policy = CPUOffloadPolicy{}});
    expect_same_training(twins, {.num_steps = 2});
  });
}

}  // namespace
}  // namespace fsdp::testing
