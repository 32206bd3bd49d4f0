// Ranks that gather or reduce different groups of equal size: an error on both, never mixed values.
#include "comm/group_state.h"
#include "sharding/pending_reduction.h"
#include "support/parity.h"

namespace fsdp::testing {
namespace {

TEST(Mixed, GathersOfEqualSizeUnderDifferentLists) {
  run_on_ranks(
      2,
      [](const RankContext& rank) {
        torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
        fill_parameters(*net, 1);
        std::vector<FSDPModule> layers;
        for (int i = 0; i < 3; ++i) layers.push_back(fully_shard(*net->ptr(i), {.mesh = rank.mesh}));
        fully_shard(net, {.mesh = rank.mesh});
        layers[0].set_modules_to_forward_prefetch({layers[rank.rank() == 0 ? 1 : 2]});
        // The first to see it says so; the other one waits in vain for it in the next step, or sees it too.
        const auto message = error_of<c10::DistError>([&] { (void)net->forward(torch::ones({2, 4})); });
        EXPECT_NE(message, "");
        if (rank.rank() == 1) return;
        EXPECT_CONTAINS(message, "the ranks do not do the same thing");
        EXPECT_CONTAINS(message, "all_gather of 1.weight and 1 more");
        EXPECT_CONTAINS(message, "all_gather of 2.weight and 1 more");
      },
      std::chrono::seconds(4));
}

TEST(Mixed, ReductionsOfEqualSize) {
  run_on_ranks(2, [](const RankContext& rank) {
    const std::string name = "gradients of layers." + std::to_string(rank.rank());
    sharding::ReductionPlan plan{.shard_group = rank.group,
                                 .replicate_group = {},
                                 .name = name,
                                 .parameters = {},
                                 .hook = {},
                                 .fingerprint = comm::Fingerprint::next(rank.group, "reduce_scatter", name, 4),
                                 .gradient_numel = 4};
    const auto row = 4 + plan.tail_numel();
    const auto input = torch::ones({2, row});
    input.narrow(1, 4, plan.tail_numel()).copy_(torch::tensor(plan.tail()));
    sharding::PendingReduction pending(std::move(plan), {}, input.view({-1}), torch::empty({row}));
    EXPECT_CONTAINS(error_of<c10::DistError>([&] { pending.wait(); }), "reduce_scatter of " + name);
    EXPECT_CONTAINS(error_of<c10::DistError>([&] { pending.wait(); }), "another group") << "every reader hears it";
  });
}

TEST(Mixed, ReductionsOfWholeParametersSayWhichRank) {
  run_on_ranks(2, [](const RankContext& rank) {
    const std::string name = "gradients of layers." + std::to_string(rank.rank());
    sharding::ReductionPlan plan{.shard_group = comm::neighbours_of(rank.group, 1),
                                 .replicate_group = rank.group,
                                 .name = name,
                                 .parameters = {},
                                 .hook = {},
                                 .fingerprint = comm::Fingerprint::next(rank.group, "all_reduce", name, 4),
                                 .gradient_numel = 4};
    const auto input = torch::cat({torch::ones({4}), torch::tensor(plan.tail())});
    sharding::PendingReduction pending(std::move(plan), {}, input, torch::empty_like(input));
    EXPECT_CONTAINS(error_of<c10::DistError>([&] { pending.wait(); }),
                    c10::str("rank ", rank.rank(), " of 2 does #1: all_reduce of ", name));
  });
}

// What a message could say of the collectives of `group`.
std::string names_in(const ProcessGroup& group) {
  std::string all;
  for (const auto& [hash, name] : comm::state_of(group)->log.names) all += name + "\n";
  return all;
}

TEST(Mixed, ReductionsAreNamedWithTheirBytes) {
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::Linear cut(4, 4), whole(4, 4);
    fill_parameters(*cut, 1);
    fill_parameters(*whole, 1);
    fully_shard(cut, {.mesh = rank.mesh});
    replicate(*whole, {.mesh = rank.mesh});
    cut(torch::ones({1, 4})).sum().backward();
    EXPECT_CONTAINS(names_in(rank.group), "reduce_scatter of gradients of weight and 1 more (40 bytes)");
    whole(torch::ones({1, 4})).sum().backward();
    EXPECT_CONTAINS(names_in(rank.group), "all_reduce of gradients of weight and 1 more (80 bytes)");
  });
}

}  // namespace
}  // namespace fsdp::testing
