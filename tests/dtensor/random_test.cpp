// Random values written to a sharded tensor are those of the full tensor with the same seed, at every world size.
#include "support/parity.h"
#include "support/spawn_ranks.h"

namespace fsdp::testing {
namespace {

struct NamedInit {
  const char* name;
  std::vector<int64_t> sizes;
  std::function<void(const at::Tensor&)> init;
};

// They draw from the process-wide generator, so their ranks are processes.
std::vector<NamedInit> all_inits() {
  namespace init = torch::nn::init;
  return {
      {"normal_", {5, 3}, [](const at::Tensor& t) { init::normal_(t, 1.0, 2.0); }},
      {"uniform_", {13, 7}, [](const at::Tensor& t) { init::uniform_(t, -1.0, 2.0); }},
      {"constant_", {5}, [](const at::Tensor& t) { init::constant_(t, 0.5); }},
      {"ones_", {5}, [](const at::Tensor& t) { init::ones_(t); }},
      {"zeros_", {5}, [](const at::Tensor& t) { init::zeros_(t); }},
      {"eye_", {5, 4}, [](const at::Tensor& t) { init::eye_(t); }},
      {"dirac_", {4, 3, 3}, [](const at::Tensor& t) { init::dirac_(t); }},
      {"orthogonal_", {7, 5}, [](const at::Tensor& t) { init::orthogonal_(t); }},
      {"sparse_", {9, 4}, [](const at::Tensor& t) { init::sparse_(t, 0.3); }},
      {"xavier_normal_", {5, 3}, [](const at::Tensor& t) { init::xavier_normal_(t); }},
      {"xavier_uniform_", {1, 17}, [](const at::Tensor& t) { init::xavier_uniform_(t); }},
      {"kaiming_normal_", {6, 2, 3, 3}, [](const at::Tensor& t) { init::kaiming_normal_(t); }},
      {"kaiming_uniform_", {5, 3}, [](const at::Tensor& t) { init::kaiming_uniform_(t); }},
      {"Tensor::normal_", {64, 16}, [](const at::Tensor& t) { t.normal_(); }},
      {"Tensor::uniform_", {3}, [](const at::Tensor& t) { t.uniform_(); }},
      {"Tensor::bernoulli_", {5, 3}, [](const at::Tensor& t) { t.bernoulli_(0.5); }},
      {"Tensor::random_", {5, 3}, [](const at::Tensor& t) { t.random_(100); }},
      {"Tensor::exponential_", {5, 3}, [](const at::Tensor& t) { t.exponential_(); }},
      {"through a view", {5, 3}, [](const at::Tensor& t) { t.view({-1}).normal_(); }},
      {"of one row", {5, 3}, [](const at::Tensor& t) { t[3].uniform_(); }},
      {"reset_parameters",
       {16, 8},
       [](const at::Tensor& t) {
         torch::nn::Linear(8, 16);  // draws too
         init::kaiming_uniform_(t, std::sqrt(5.0));
       }},
  };
}

void expect_same_random_values(const RankContext& rank) {
  const torch::NoGradGuard no_grad;
  for (const auto& [name, sizes, init] : all_inits()) {
    auto plain = torch::zeros(sizes);
    auto sharded = distribute_tensor(torch::zeros(sizes), rank.mesh, {Shard{0}}, std::nullopt).tensor();
    std::vector<at::Tensor> next;
    for (const auto& tensor : {plain, sharded}) {
      torch::manual_seed(3);
      init(tensor);
      next.push_back(torch::rand({3}));
    }
    EXPECT_TRUE(DTensor::is(sharded)) << name;
    EXPECT_LE(difference(plain, sharded), 0) << name;
    EXPECT_LE(difference(next[0], next[1]), 0) << name << " leaves the generator elsewhere";
  }
}

RANKS_BODY(random_inits) {
  init_process_group();
  expect_same_random_values(default_rank_context());
}

TEST(Random, EveryInitOnADTensor) {
  for (int size : {1, 2, 3, 4}) {
    EXPECT_ALL_RANKS_OK(spawn_ranks(size, "random_inits"));
  }
}

TEST(Random, AModuleInitialisedAfterWrapping) {
  for (int size : {1, 2, 3, 4}) {
    run_on_ranks(size, [](const RankContext& rank) {
      Twins twins(rank, net_of<Mlp>());
      for (auto* parameters : {&twins.p, &twins.q}) {
        const torch::NoGradGuard no_grad;
        auto generator = seeded(3);
        for (auto& parameter : *parameters) {
          parameter.uniform_(-1, 1, generator);
        }
      }
      EXPECT_SAME_PARAMETERS(twins, 0);
      expect_same_training(twins, {.num_steps = 2});
    });
  }
}

}  // namespace
}  // namespace fsdp::testing
