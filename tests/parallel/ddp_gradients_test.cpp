// Gradients of DistributedDataParallel over several backwards: summed up without sync, as views of the buckets, and
// zeroed by an optimizer.
#include <fsdp/distributed_data_parallel.h>

#include "support/parity.h"

namespace fsdp::testing {
namespace {

using SummedDdp = DistributedDataParallel<TestNet>;

// All but the last backward in no_sync().
void accumulate(Twins& twins, SummedDdp& ddp, int num_backwards) {
  for (int i = 1; i <= num_backwards; ++i) {
    std::optional<NoSync> scope;
    if (i < num_backwards) scope.emplace(ddp->no_sync());
    ddp->forward(twins.part).square().mean().backward();
    twins.plain->forward(twins.joined).square().mean().backward();
    twins.next_batch();
  }
}

TEST(DdpGradients, AStaticGraphWhoseFirstStepAccumulates) {
  on_two_and_three([](const RankContext& rank) {
    for (const int num_backwards : {2, 3}) {
      Twins twins(rank, net_of<Mlp>(), {.shard = false});
      SummedDdp ddp(twins.sharded, {.mesh = rank.mesh, .bucket_cap_mb = 1e-6, .static_graph = true});
      for (int step = 0; step < 3; ++step) {
        accumulate(twins, ddp, num_backwards);
        EXPECT_SAME_GRADS(twins, kClose) << "step " << step;
        twins.plain->zero_grad();
        ddp->zero_grad();
      }
    }
  });
}

void expect_views_survive_the_optimizer(const RankContext& rank, DistributedDataParallelOptions options,
                                        bool set_to_none) {
  options.mesh = rank.mesh;
  options.gradient_as_bucket_view = true;
  Twins twins(rank, net_of<Mlp>(), {.shard = false});
  SummedDdp ddp(twins.sharded, options);
  const auto p = sgd()(twins.p), q = sgd()(twins.q);
  for (int step = 0; step < 4; ++step) {
    accumulate(twins, ddp, 1 + step % 2);
    EXPECT_SAME_GRADS(twins, kClose) << "step " << step;
    for (const auto& parameter : twins.q)
      EXPECT_TRUE(parameter.grad().is_alias_of(twins.q.front().grad())) << "one bucket holds all, step " << step;
    for (const auto& optimizer : {p.get(), q.get()}) {
      optimizer->step();
      optimizer->zero_grad(set_to_none);
    }
  }
  EXPECT_SAME_PARAMETERS(twins, kClose);
}

TEST(DdpGradients, ViewsOfTheBucketAreZeroedByTheOptimizer) {
  run_on_ranks(2, [](const RankContext& rank) {
    for (const bool set_to_none : {true, false}) {
      expect_views_survive_the_optimizer(rank, {}, set_to_none);
      expect_views_survive_the_optimizer(rank, {.find_unused_parameters = true}, set_to_none);
      expect_views_survive_the_optimizer(rank, {.static_graph = true}, set_to_none);
    }
  });
}

}  // namespace
}  // namespace fsdp::testing
