// What DistributedDataParallel refuses, and that every rank hears of it.
#include <fsdp/distributed_data_parallel.h>
#include <fsdp/fully_shard.h>
#include <fsdp/materialize.h>

#include "support/counting_backend.h"
#include "support/errors.h"
#include "support/parity.h"
#include "support/spawn_ranks.h"

namespace fsdp::testing {
namespace {

template <class Module>
std::string refused_by_ddp(const Module& module, const DistributedDataParallelOptions& options) {
  return error_of<c10::ValueError>([&] { const DistributedDataParallel ddp(module, options); });
}

TEST(DdpMisuse, ModulesThatCannotBeTaken) {
  run_on_ranks(2, [](const RankContext& rank) {
    const DistributedDataParallelOptions options{.mesh = rank.mesh};
    torch::nn::Linear frozen(3, 3);
    for (auto& parameter : frozen->parameters()) parameter.requires_grad_(false);
    EXPECT_CONTAINS(refused_by_ddp(frozen, options), "(Linear): no parameter requires grad");  // behaviours 152
    EXPECT_CONTAINS(refused_by_ddp(std::shared_ptr<torch::nn::LinearImpl>(), options), "no module to wrap");

    torch::nn::Linear sharded(3, 3);
    fill_parameters(*sharded, 1);
    fully_shard(sharded, {.mesh = rank.mesh});
    EXPECT_CONTAINS(refused_by_ddp(sharded, options), "'weight' is sharded already");

    torch::nn::Linear twice(3, 3);
    DistributedDataParallel ddp(twice, options);
    EXPECT_CONTAINS(refused_by_ddp(twice, options), "'weight' is in a DistributedDataParallel already");
    EXPECT_CONTAINS(refused_by_ddp(ddp, options), "'weight' is in a DistributedDataParallel already");

    EXPECT_CONTAINS(refused_by_ddp(
                        [] {
                          const MetaDeviceGuard meta;
                          return torch::nn::Linear(3, 3);
                        }(),
                        options),
                    "'weight' is on the meta device");
  });
}

TEST(DdpMisuse, Options) {
  run_on_ranks(2, [](const RankContext& rank) {
    const torch::nn::Linear net(3, 3);
    EXPECT_CONTAINS(refused_by_ddp(net, {.mesh = mesh_2d(rank, 2, 1, "two")}), "takes a 1-D mesh, got 2 dims");
    EXPECT_CONTAINS(refused_by_ddp(net, {.mesh = rank.mesh, .bucket_cap_mb = 0}), "bucket_cap_mb is 0");
    EXPECT_CONTAINS(refused_by_ddp(net, {.mesh = rank.mesh, .bucket_cap_mb = std::numeric_limits<double>::infinity()}),
                    "bucket_cap_mb is inf");
  });
}

TEST(DdpMisuse, ABucketOfMoreBytesThanCanBeCountedHoldsEverything) {
  run_on_ranks(2, [](const RankContext& rank) {
    const auto group =
        make_counting_group(c10::make_intrusive<c10d::PrefixStore>("counted", rank.store), rank.rank(), 2);
    DistributedDataParallel ddp(net_of<Mlp>()(),
                                {.mesh = DeviceMesh::from_group(group, torch::kCPU), .bucket_cap_mb = 1e300});
    const auto net = ddp->wrapped();
    for (int step = 0; step < 3; ++step) ddp->forward(net->batch(2, seeded(1))).square().mean().backward();
    EXPECT_EQ(counts_of(group).num_all_reduces(), 3) << "one bucket, also when they are made anew";
  });
}

TEST(DdpMisuse, RanksWithDifferentModules) {
  run_on_ranks(2, [](const RankContext& rank) {
    const auto seq = [&](int64_t width, bool trains) {
      torch::nn::Sequential net(torch::nn::Linear(3, 3), torch::nn::Linear(3, width));
      net->parameters().back().requires_grad_(trains);
      return net;
    };
    const auto shapes = refused_by_ddp(seq(4 + rank.rank(), true), {.mesh = rank.mesh});
    EXPECT_CONTAINS(shapes, "the first rank has 'parameter 1.weight [4, 3] Float");
    EXPECT_CONTAINS(shapes, "rank 1 has 'parameter 1.weight [5, 3] Float");
    EXPECT_CONTAINS(refused_by_ddp(seq(4, rank.rank() == 0), {.mesh = rank.mesh}), "frozen parameter 1.bias");
    EXPECT_CONTAINS(refused_by_ddp(seq(4, true), {.mesh = rank.mesh, .find_unused_parameters = rank.rank() == 0}),
                    "find_unused_parameters 1");
  });
}

TEST(DdpMisuse, ChangesAfterWrapping) {
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::Linear net(3, 3);
    net->bias.requires_grad_(false);
    DistributedDataParallel ddp(net, {.mesh = rank.mesh});
    EXPECT_CONTAINS(error_of<c10::ValueError>([&] { ddp->to(torch::kDouble); }), "'weight' is Float on cpu");
    ddp->to(torch::kFloat);
    ddp->to(torch::kCPU);
    net->bias.requires_grad_(true);
    EXPECT_CONTAINS(error_of([&] { ddp->forward(torch::ones({1, 3})); }), "'bias' did not require grad");
    net->bias.requires_grad_(false);
    net->to(torch::kDouble);  // behind its back
    EXPECT_CONTAINS(error_of([&] {
                      ddp->forward(torch::ones({1, 3}, torch::kDouble));
                    }),
                    "parameter 'weight' was float");
  });
}

TEST(DdpMisuse, WeightsFromRank0Alone) {
  run_on_ranks(2, [](const RankContext& rank) {
    DistributedDataParallel ddp(torch::nn::Linear(3, 3), {.mesh = rank.mesh});
    const auto whole = full_state_dict(*ddp);
    ASSERT_EQ(whole.size(), 2) << "on every rank";
    const LoadStateDictOptions from_rank0{.broadcast_from_rank0 = true};
    EXPECT_CONTAINS(error_of<c10::ValueError>([&] { load_state_dict(*ddp, whole, from_rank0); }),
                    "in a DistributedDataParallel, on every rank");
    torch::optim::SGD optimizer(ddp->parameters(), 0.1);
    const auto state = full_optimizer_state_dict(*ddp, optimizer);
    EXPECT_CONTAINS(error_of<c10::ValueError>([&] { load_optimizer_state_dict(*ddp, optimizer, state, from_rank0); }),
                    "in a DistributedDataParallel, on every rank");
    EXPECT_TRUE(load_state_dict(*ddp, whole).missing_keys.empty());
  });
}

TEST(DdpMisuse, ARankThatDoesNotWrapIsNamed) {
  run_on_ranks(
      2,
      [](const RankContext& rank) {
        if (rank.rank() == 1) return;
        const auto message = error_of<c10::DistError>(
            [&] { const DistributedDataParallel ddp(torch::nn::Linear(3, 3), {.mesh = rank.mesh}); });
        EXPECT_CONTAINS(message, "ranks [1] did not come");
      },
      std::chrono::seconds(4));
}

// Rank 1 leaves between two steps; the others are in backward then.
RANKS_BODY(ddp_peer_leaves) {
  init_process_group({.timeout = std::chrono::seconds(8)});
  DistributedDataParallel ddp(torch::nn::Linear(3, 3));
  const auto step = [&] { ddp->forward(torch::ones({2, 3})).sum().backward(); };
  step();
  step();
  if (rank() == 1) return;
  const auto message = error_of<c10::DistError>([&] {
    step();
    step();
  });
  EXPECT_CONTAINS(message, "all_reduce of the gradients of ");
  EXPECT_CONTAINS(message, "A peer left");
}

TEST(DdpMisuse, EveryRankHearsOfALostPeer) { EXPECT_ALL_RANKS_OK(spawn_ranks(3, "ddp_peer_leaves")); }

}  // namespace
}  // namespace fsdp::testing
