// A gradient in flight that is added to a sum: the sum gets what the gradient was at that moment, whoever comes next.
#include "dtensor/shard_state.h"
#include "support/parity.h"

namespace fsdp::testing {
namespace {

// Adds the gradient of `p` and goes on using it; returns what must not depend on when the addition is carried out.
struct NamedSum {
  const char* name;
  std::function<at::Tensor(TestNet&, const at::Tensor& x, const at::Tensor& p)> sum;
};

std::vector<NamedSum> all_sums() {
  const auto sum_of = [](const at::Tensor& p) { return at::zeros_like(p).add_(p.grad()); };
  return {
      {"zeroed",
       [=](TestNet&, const at::Tensor&, const at::Tensor& p) {
         auto sum = sum_of(p);
         p.mutable_grad().zero_();
         return sum;
       }},
      {"clipped",
       [=](TestNet&, const at::Tensor&, const at::Tensor& p) {
         auto sum = sum_of(p);
         at::_foreach_mul_({p.grad()}, 0.25);
         return sum;
       }},
      {"replaced",
       [=](TestNet&, const at::Tensor&, const at::Tensor& p) {
         auto sum = sum_of(p);
         p.mutable_grad().set_data(at::ones_like(p));
         return sum;
       }},
      {"accumulated",
       [=](TestNet& net, const at::Tensor& x, const at::Tensor& p) {
         auto sum = sum_of(p);
         const at::AutoGradMode grad_mode(true);
         net.loss(x).backward();
         return sum;
       }},
      {"added_back",
       [=](TestNet&, const at::Tensor&, const at::Tensor& p) { return p.mutable_grad().add_(sum_of(p)); }},
      {"added_twice",
       [=](TestNet&, const at::Tensor&, const at::Tensor& p) {
         auto first = sum_of(p), second = sum_of(p);
         p.mutable_grad().zero_();
         return first + 2 * second;
       }},
      {"passed_on",
       [=](TestNet&, const at::Tensor&, const at::Tensor& p) {
         auto first = sum_of(p);
         auto second = at::zeros_like(p).add_(first);
         first.zero_();
         p.mutable_grad().zero_();
         return second;
       }},
  };
}

class QueuedAdditions : public ::testing::TestWithParam<size_t> {};

TEST_P(QueuedAdditions, TakeTheGradientAsItWas) {
  const auto sum = all_sums()[GetParam()].sum;
  on_two_and_three([&](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    twins.backward();
    const torch::NoGradGuard no_grad;
    std::vector<at::Tensor> sums;
    twins.both([&](TestNet& net, const at::Tensor& x) { sums.push_back(sum(net, x, net.parameters()[2])); });
    EXPECT_LE(difference(sums[0], sums[1]), kClose);
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

INSTANTIATE_TEST_SUITE_P(AllKinds, QueuedAdditions, ::testing::Range(size_t{0}, all_sums().size()),
                         [](const auto& info) { return all_sums()[info.param].name; });

TEST(QueuedAddition, OfASecondBackwardDoesNotWait) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    for (int i = 0; i < 3; ++i) twins.backward();
    for (const auto& q : twins.q) EXPECT_TRUE(dtensor::state_of(q.grad())->is_pending());
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

TEST(QueuedAddition, IsSeenByWhoHoldsThePart) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    twins.backward();
    const torch::NoGradGuard no_grad;
    const auto& gradient = twins.q[2].grad();
    const auto sum = at::zeros_like(twins.q[2]);
    const auto part = DTensor(sum).to_local();
    sum.add_(gradient);
    EXPECT_LE(difference(DTensor(gradient).to_local(), part), 0);
  });
}

}  // namespace
}  // namespace fsdp::testing
