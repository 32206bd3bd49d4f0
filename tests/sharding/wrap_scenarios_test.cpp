// PyTorch's scenarios of wrapping: who owns a parameter, values given between wrapping and the first forward, meshes
// made in other ways, placements, dtypes side by side.
#include "sharding/module_tree.h"
#include "support/parity.h"
#include "support/spawn_ranks.h"

namespace fsdp::testing {
namespace {

TEST(ManagedModules, EachParameterIsInOneGroupUnderItsPath) {  // behaviours 85, 86, 91
  run_on_ranks(2, [](const RankContext& rank) {
    const auto net = std::make_shared<Blocks>(Blocks::Kind::kPlain, 2);
    net->register_module("again", net->blocks[0]->inner);
    fill_parameters(*net, 1);
    auto& second = *net->blocks[1];
    const auto wrapped = std::vector<FSDPModule>{
        fully_shard(net->blocks[0]->inner, {.mesh = rank.mesh}), fully_shard(net->blocks[0], {.mesh = rank.mesh}),
        fully_shard({second.first.ptr(), second.second.ptr()}, {.mesh = rank.mesh}),
        fully_shard(net, {.mesh = rank.mesh})};
    for (const auto& module : wrapped) EXPECT_EQ(module.state()->is_root(), &module == &wrapped.back());
    std::map<std::string, size_t> groups;  // name -> number of parameters
    std::set<const void*> distinct;
    for (const auto& parameter : net->parameters()) {
      const auto group = sharding::group_of(parameter);
      if (distinct.insert(parameter.unsafeGetTensorImpl()).second) ++groups[group->name()];
    }
    EXPECT_EQ(groups, (std::map<std::string, size_t>{{"block0.inner.linear.weight and 1 more", 2},
                                                     {"block0.first.weight and 3 more", 4},
                                                     {"block1.first.weight and 3 more", 4},
                                                     {"in.weight and 5 more", 6}}));
    EXPECT_EQ(distinct.size(), 16U);
    const auto named = net->named_parameters();
    EXPECT_TRUE(named["again.linear.weight"].is_same(named["block0.inner.linear.weight"]));
    EXPECT_FALSE(is_fsdp(second)) << "its children are wrapped, and the root has the rest";
  });
}

// Ways to give a wrapped net other values before its first forward.
enum class Reset { kSetData, kLoad, kMaterialize };

void reset_values(Reset how, Twins& twins) {
  auto source = net_of<Mlp>()();
  fill_parameters(*source, 77);
  load_state_dict(*twins.plain, state_dict(*source));
  if (how == Reset::kLoad) {
    load_state_dict(*twins.sharded, state_dict(*source));
  } else if (how == Reset::kSetData) {
    const auto values = source->parameters();
    for (size_t i = 0; i < values.size(); ++i) twins.q[i].set_data(values[i].detach().clone());
  } else {
    materialize(twins.sharded, torch::kCPU, [&](torch::nn::Module& net) { load_state_dict(net, state_dict(*source)); });
  }
}

TEST(ValuesBeforeTheFirstForward, AreTrainedOn) {  // behaviours 94
  for (const auto how : {Reset::kSetData, Reset::kLoad, Reset::kMaterialize}) {
    on_two_and_three([how](const RankContext& rank) {
      const auto make = [how]() -> std::shared_ptr<TestNet> {
        std::optional<MetaDeviceGuard> meta;
        if (how == Reset::kMaterialize) meta.emplace();
        return std::make_shared<Mlp>();
      };
      Twins twins(rank, net_of<Mlp>(), {.shard = false});
      twins.sharded = make();
      twins.q = twins.sharded->parameters();
      if (how != Reset::kMaterialize) fill_parameters(*twins.sharded, 5);
      shard_units(*twins.sharded, rank.mesh);
      reset_values(how, twins);
      EXPECT_SAME_PARAMETERS(twins, 0);
      expect_same_training(twins, {.num_steps = 4, .optimizer = all_optimizers()[1].make});
    });
  }
}

// Rank 0 alone has values; each parameter is scattered as its own layout asks.
TEST(ValuesBeforeTheFirstForward, ScatteredFromRankZeroByDistributeTensor) {  // behaviours 98
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>(), {.shard = false});
    {
      const MetaDeviceGuard meta;
      twins.sharded = std::make_shared<Mlp>();
    }
    shard_units(*twins.sharded, rank.mesh);
    twins.q = twins.sharded->parameters();
    StateDict scattered;
    for (const auto& item : twins.sharded->named_parameters()) {
      const DTensor target(item.value());
      const auto values = rank.rank() == 0 ? twins.plain->named_parameters()[item.key()].detach()
                                           : torch::full(item.value().sizes(), std::nan(""));
      scattered.insert(item.key(), distribute_tensor(values, target.device_mesh(), target.placements(), 0).tensor());
    }
    materialize(twins.sharded, torch::kCPU, [&](torch::nn::Module& net) { load_state_dict(net, scattered); });
    EXPECT_LE(own_difference(twins.p, twins.q), 0);
    expect_same_training(twins, {.num_steps = 5});
  });
}

std::vector<at::Tensor> gradients_over(const DeviceMesh& mesh) {
  auto rank = default_rank_context();
  rank.mesh = mesh;
  Twins twins(rank, net_of<Mlp>());
  twins.backward();
  EXPECT_SAME_GRADS(twins, kClose);
  std::vector<at::Tensor> parts;
  for (const auto& grad : grads(twins.q)) parts.push_back(DTensor(grad).to_local().clone());
  return parts;
}

RANKS_BODY(meshes_from_groups_that_exist) {
  init_process_group();
  const auto one = init_device_mesh(torch::kCPU, {world_size()}, {"dp"});
  const auto one_again = DeviceMesh::from_group(default_group(), torch::kCPU, {"dp"});
  EXPECT_LE(difference(gradients_over(one), gradients_over(one_again)), 0);
  const std::vector<std::string> names{"replicate", "shard"};
  const auto grid = init_device_mesh(torch::kCPU, {2, 2}, names);
  const auto grid_again =
      DeviceMesh::from_group({grid.get_group(0), grid.get_group(1)}, torch::kCPU, grid.mesh(), names);
  EXPECT_LE(difference(gradients_over(grid), gradients_over(grid_again)), 0);
}

TEST(Meshes, FromGroupsTrainAsThoseOfInitDeviceMesh) {  // behaviours 99
  EXPECT_ALL_RANKS_OK(spawn_ranks(4, "meshes_from_groups_that_exist"));
}

// Where it is cut most evenly: the first of the largest dims.
std::optional<ShardPlacementResult> on_largest_dim(const std::string&, const at::Tensor& parameter) {
  const auto sizes = parameter.sizes();
  return ShardPlacementResult{Shard{std::max_element(sizes.begin(), sizes.end()) - sizes.begin()}};
}

TEST(Placements, LargestDimOfTwoLayersInOneGroup) {  // behaviours 8
  on_two_and_three([](const RankContext& rank) {
    if (rank.size() == 3) return;
    Twins twins(rank, net_of<Mlp>(16, 32, 16, 8),
                {.dtype = torch::kDouble, .shard = false});  // [32, 16], [16, 32], [8, 16]
    fully_shard(*twins.sharded, {.mesh = rank.mesh, .shard_placement_fn = on_largest_dim});
    EXPECT_EQ(DTensor(twins.q[2]).placements(), Placements{Shard{1}});
    expect_same_training(twins, {.tolerance = 1e-10, .optimizer = all_optimizers()[3].make});
  });
}

TEST(Placements, LargestDimOfATransformerOnEightRanks) {  // behaviours 24, 102
  run_on_ranks(8, [](const RankContext& rank) {
    Twins twins(rank, net_of<Gpt>(3, false, 16, 16, 4, 8),
                {.rows_per_rank = 1, .dtype = torch::kDouble, .shard = false});
    shard_units(*twins.sharded, {.mesh = rank.mesh, .shard_placement_fn = on_largest_dim});
    int num_on_dim_1 = 0;
    for (const auto& parameter : twins.q) {
      const auto placements = DTensor(parameter).placements();
      ASSERT_EQ(placements.size(), 1U);
      num_on_dim_1 += placements[0] == Placement(Shard{1}) ? 1 : 0;
    }
    EXPECT_EQ(num_on_dim_1, 4) << "positions, and the second projection of three blocks";
    EXPECT_SAME_PARAMETERS(twins, 0);
    expect_same_training(twins, {.num_steps = 5, .tolerance = 1e-10, .optimizer = all_optimizers()[5].make});
    torch::nn::Sequential uneven(torch::nn::Linear(16, 17), torch::nn::Linear(17, 8));
    fill_parameters(*uneven, 1);
    const auto message = error_of<c10::NotImplementedError>(
        [&] { fully_shard(uneven, {.mesh = rank.mesh, .shard_placement_fn = on_largest_dim}); });
    EXPECT_CONTAINS(message, "dim 1 of '1.weight' is 17");
  });
}

TEST(MixedDtypes, AFrozenFloat8WeightBesideATrainableOne) {  // behaviours 103
  on_two_and_three([](const RankContext& rank) {
    struct Net : torch::nn::Module {
      at::Tensor frozen =
          register_parameter("frozen", torch::ones({256, 256}).to(at::kFloat8_e4m3fn), /*requires_grad=*/false);
      at::Tensor trained = register_parameter("trained", torch::ones({256, 256}));
      void forward() {}
    } net;
    fully_shard(net, {.mesh = rank.mesh});
    EXPECT_EQ(DTensor(net.frozen).to_local().scalar_type(), at::kFloat8_e4m3fn);
    net.forward();
    const auto loss = (net.trained * net.frozen.to(at::kFloat)).sum();
    EXPECT_EQ(loss.item<float>(), 256 * 256);
    loss.backward();
    EXPECT_LE(difference(torch::ones({256, 256}), net.trained.grad()), 0);
  });
}

}  // namespace
}  // namespace fsdp::testing
