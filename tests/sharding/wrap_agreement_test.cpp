// What ranks must agree on when they wrap, on meshes of several dims, over parts of the world, and where parameters
// have meshes of their own.
#include "support/parity.h"
#include "support/spawn_ranks.h"

namespace fsdp::testing {
namespace {

struct CollectWarnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override { text += warning.msg(); }
  std::string text;
};

TEST(WrapAgreement, EveryRankOfAGridHearsWhatOneHasOtherwise) {
  run_on_ranks(4, [](const RankContext& rank) {
    const auto mesh = mesh_2d(rank, 2, 2, "grid", {"replicate", "shard"}, "gloo", std::chrono::seconds(4));
    torch::nn::Linear net(4, rank.rank() == 3 ? 5 : 4);
    const auto message = error_of<c10::ValueError>([&] { fully_shard(net, {.mesh = mesh}); });
    EXPECT_CONTAINS(message, "the ranks wrap different modules: the first rank has ");
    EXPECT_CONTAINS(message, "weight [5, 4]");
  });
}

TEST(WrapAgreement, BuffersThatAreBroadcastHaveOneSize) {
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::Module net;
    net.register_parameter("weight", torch::ones({4}));
    net.register_buffer("state", torch::zeros({3 + rank.rank()}));
    EXPECT_CONTAINS(error_of<c10::ValueError>([&] { fully_shard(net, {.mesh = rank.mesh, .sync_init = true}); }),
                    "'buffer state [3] Float'");
    fully_shard(net, {.mesh = rank.mesh});
    EXPECT_TRUE(is_fsdp(net)) << "buffers that stay where they are may differ";
  });
}

// Layer 2 is an expert of ranks {0, 1} and another one of ranks {2, 3}.
struct Experts {
  explicit Experts(const RankContext& rank, const std::string& name)
      : mesh(mesh_2d(rank, 2, 2, name, {"pipeline", "expert"})["expert"]) {}
  [[nodiscard]] FullyShardOptions options(const RankContext& rank, bool sync_init) const {
    return {.mesh = rank.mesh,
            .sync_init = sync_init,
            .shard_placement_fn = [mesh = mesh](const std::string& path, const at::Tensor&) {
              return path.starts_with("layers.2.") ? std::optional(ShardPlacementResult{Shard{0}, mesh}) : std::nullopt;
            }};
  }
  DeviceMesh mesh;
};

// The net that `seed` gives, with the expert of another seed.
std::shared_ptr<TestNet> net_with_expert(uint64_t seed, uint64_t expert_seed) {
  auto net = square_mlp()(), other = square_mlp()();
  fill_parameters(*net, seed);
  fill_parameters(*other, expert_seed);
  const torch::NoGradGuard no_grad;
  for (const int i : {2, 3}) net->parameters()[i].copy_(other->parameters()[i]);
  return net;
}

TEST(WrapAgreement, SyncInitStartsExpertsFromTheirOwnFirstRank) {
  run_on_ranks(4, [](const RankContext& rank) {
    const auto seed = static_cast<uint64_t>(10 + rank.rank());
    const auto net = net_with_expert(seed, seed);
    fully_shard(*net, Experts(rank, "synced").options(rank, /*sync_init=*/true));
    const auto first_of_pair = static_cast<uint64_t>(10 + rank.rank() / 2 * 2);
    EXPECT_LE(difference(net_with_expert(10, first_of_pair)->parameters(), net->parameters()), 0);
  });
}

TEST(WrapAgreement, ExpertsAreComparedOverTheirOwnMesh) {
  run_on_ranks(4, [](const RankContext& rank) {
    const auto warnings_of = [&](const std::string& name, uint64_t expert_seed) {
      const auto net = net_with_expert(10, expert_seed);
      CollectWarnings collect;
      const c10::WarningUtils::WarningHandlerGuard guard(&collect);
      fully_shard(*net, Experts(rank, name).options(rank, /*sync_init=*/false));
      return collect.text;
    };
    const int pair = rank.rank() / 2;
    EXPECT_EQ(warnings_of("equal", 10 + pair), "");
    const auto text = warnings_of("different", rank.rank() == 3 ? 77 : 10);
    EXPECT_EQ(text.find("layers.2.weight") != std::string::npos, pair == 1) << text;
    EXPECT_EQ(text.empty(), pair == 0) << text;
  });
}

FullyShardOptions in_pairs(const DeviceMesh& mesh, const DeviceMesh& of_layer_2) {
  return {
      .mesh = mesh,
      .reshard_after_forward = 2,
      .shard_placement_fn = [of_layer_2](const std::string& path, const at::Tensor&) {
        return path.starts_with("layers.2.") ? std::optional(ShardPlacementResult{Shard{0}, of_layer_2}) : std::nullopt;
      }};
}

TEST(WrapAgreement, ANumberOfNeighboursMustFitEveryMesh) {
  run_on_ranks(6, [](const RankContext& rank) {
    const auto net = square_mlp()();
    const auto threes = mesh_2d(rank, 2, 3, "threes", {"pipeline", "expert"})["expert"];
    EXPECT_CONTAINS(error_of<c10::ValueError>([&] { fully_shard(*net, in_pairs(rank.mesh, threes)); }),
                    "reshard_after_forward is 2, but 'layers.2.weight' is cut over 3 ranks");
    EXPECT_FALSE(is_fsdp(*net));
  });
}

TEST(WrapAgreement, NeighboursWithinAMeshOfItsOwn) {
  run_on_ranks(4, [](const RankContext& rank) {
    for (const int columns : {4, 2}) {
      const auto experts = mesh_2d(rank, 4 / columns, columns, "of " + std::to_string(columns), {"rest", "expert"});
      Twins twins(rank, square_mlp(), {.shard = false});
      fully_shard(*twins.sharded, in_pairs(rank.mesh, experts["expert"]));
      twins.backward();
      for (const int i : {0, 1, 4, 5}) EXPECT_LE(difference(twins.p[i].grad(), twins.q[i].grad()), kClose) << i;
      if (columns == 4) {
        EXPECT_SAME_GRADS(twins, kClose);
      }
    }
  });
}

// Two stages of a pipeline, each with data-parallel ranks of its own.
RANKS_BODY(whole_parameters_over_a_part_of_the_world) {
  init_process_group({.timeout = std::chrono::seconds(20)});
  const auto mesh = init_device_mesh(torch::kCPU, {2, 2, 1}, {"pp", "dp", "cp"});
  torch::nn::Linear net(4, 4);
  fill_parameters(*net, 1);
  fully_shard(net, {.mesh = mesh, .dp_mesh_dims = {.shard = {"dp"}, .replicate = {"cp"}}, .replicate_below = 5});
  EXPECT_EQ(DTensor(net->bias).placements(), Placements{Replicate{}});
  EXPECT_EQ(DTensor(net->bias).device_mesh().size(), 2);
  (net(torch::ones({1, 4})) * rank()).sum().backward();
  const double mean = mesh.get_local_rank("pp") == 0 ? 0.5 : 2.5;
  EXPECT_LE(difference(torch::full({4, 4}, mean), net->weight.grad()), 0);
  EXPECT_LE(difference(torch::full({4}, mean), net->bias.grad()), 0);
  destroy_process_group();
}
TEST(ReplicateBelow, OverAPartOfTheWorld) {
  EXPECT_ALL_RANKS_OK(spawn_ranks(4, "whole_parameters_over_a_part_of_the_world"));
}

RANKS_BODY(whole_parameters_on_some_ranks_only) {
  init_process_group({.timeout = std::chrono::seconds(20)});
  const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
  const auto refusal = [&](bool has_bias, int64_t replicate_below) {
    torch::nn::Linear net(torch::nn::LinearOptions(4, 4).bias(has_bias));
    return error_of<c10::ValueError>([&] { fully_shard(net, {.mesh = mesh, .replicate_below = replicate_below}); });
  };
  EXPECT_CONTAINS(refusal(/*has_bias=*/rank() != 3, 5), "'bias [4] Float whole over [2, 2] ranks'");
  EXPECT_CONTAINS(refusal(/*has_bias=*/false, rank() == 3 ? 0 : 5), "'replicate_below 0'");
  torch::nn::Linear net(4, 4);
  fill_parameters(*net, 1);
  fully_shard(net, {.mesh = mesh, .replicate_below = 5});
  (net(torch::ones({1, 4})) * rank()).sum().backward();
  EXPECT_LE(difference(torch::full({4}, 1.5), net->bias.grad()), 0);
  destroy_process_group();
}
TEST(ReplicateBelow, RanksThatDifferInWhatIsWholeAreToldSo) {
  EXPECT_ALL_RANKS_OK(spawn_ranks(4, "whole_parameters_on_some_ranks_only"));
}

TEST(ReplicateBelow, OnAGridOfOtherGroupsIsRefused) {
  run_on_ranks(4, [](const RankContext& rank) {
    torch::nn::Linear net(4, 4);
    fill_parameters(*net, 1);
    const auto mesh = mesh_2d(rank, 2, 2, "grid");
    EXPECT_CONTAINS(error_of([&] { fully_shard(net, {.mesh = mesh, .replicate_below = 5}); }), "replicate_below");
    EXPECT_FALSE(is_fsdp(*net));
  });
}

}  // namespace
}  // namespace fsdp::testing
