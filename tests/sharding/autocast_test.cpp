// LibTorch's autocast around a model that has a policy of its own.
#include <ATen/autocast_mode.h>

#include "support/parity.h"
#include "support/spawn_ranks.h"

namespace fsdp::testing {
namespace {

// This thread's operators under autocast.
class AutocastScope {
 public:
  AutocastScope() {
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, true);
  }
  ~AutocastScope() {
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;
};

at::Tensor loss_under_autocast(TestNet& net, const at::Tensor& x) {
  const AutocastScope autocast;
  const auto y = net.forward(x);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  return y.to(at::kFloat).square().mean();
}

void train_under_autocast(const MixedPrecisionPolicy& policy) {
  const auto rank = default_rank_context();
  Twins twins(rank, square_mlp(), {.shard = false});
  shard_units(*twins.sharded, {.mesh = rank.mesh, .mp_policy = policy});
  auto p = sgd()(twins.p), q = sgd()(twins.q);
  double first = 0, last = 0;
  for (int step = 0; step < 10; ++step) {
    const auto expected = loss_under_autocast(*twins.plain, twins.joined),
               loss = loss_under_autocast(*twins.sharded, twins.part);
    expected.backward();
    loss.backward();
    last = mean_over_ranks(loss, rank.group);
    if (step == 0) first = last;
    EXPECT_NEAR(expected.item<double>(), last, 1e-2 * std::max(1.0, last)) << "step " << step;
    for (const auto& parameter : twins.q) {
      EXPECT_EQ(parameter.scalar_type(), at::kFloat);
      EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
    }
    EXPECT_SAME_GRADS(twins, 2e-2);
    p->step();
    q->step();
    twins.zero_grad();
  }
  EXPECT_LT(last, first) << "it trains";
  EXPECT_SAME_PARAMETERS(twins, 2e-2);
}

RANKS_BODY(autocast_on_mixed_precision) {  // processes: autocast has one cache a process
  init_process_group();
  train_under_autocast({.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat});
  train_under_autocast({.reduce_dtype = at::kFloat});
  train_under_autocast({});
  destroy_process_group();
}

TEST(Autocast, OnTopOfMixedPrecisionTrainsAsOneProcess) {
  for (const int size : {1, 2}) EXPECT_ALL_RANKS_OK(spawn_ranks(size, "autocast_on_mixed_precision"));
}

}  // namespace
}  // namespace fsdp::testing
