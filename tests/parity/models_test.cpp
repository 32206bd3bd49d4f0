// Ten steps of whole models equal one process on the joined batch, at every world size, in both precisions.
#include "support/parity.h"
#include "support/spawn_ranks.h"

namespace fsdp::testing {
namespace {

struct ModelCase {
  const char* name;
  NetFactory net;
};

std::vector<ModelCase> model_cases() {
  return {{"Mlp", net_of<Mlp>()}, {"Gpt", net_of<Gpt>()}, {"Encoder", net_of<Encoder>()}, {"Lstm", net_of<Lstm>()}};
}

class ModelParity : public ::testing::TestWithParam<std::tuple<size_t, int>> {};

TEST_P(ModelParity, TrainsAsOneProcess) {
  const auto [which, size] = GetParam();
  const auto net = model_cases()[which].net;
  run_on_ranks(size, [&](const RankContext& rank) {
    Twins single(rank, net, {.dtype = torch::kFloat});
    expect_same_training(single, {.tolerance = 1e-5});
    Twins twice(rank, net, {.dtype = torch::kDouble});
    expect_same_training(twice, {.tolerance = 1e-10});
  });
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, ModelParity,
                         ::testing::Combine(::testing::Range(size_t{0}, model_cases().size()),
                                            ::testing::Values(1, 2, 3, 4)),
                         [](const auto& info) {
                           return std::string(model_cases()[std::get<0>(info.param)].name) + "_" +
                                  std::to_string(std::get<1>(info.param));
                         });

// The ways in which a module tree can be cut into groups.
TEST(GroupParity, TrainsAsOneProcess) {
  using Kind = Blocks::Kind;
  for (const auto kind : {Kind::kNestedInner, Kind::kRootInBlock, Kind::kSiblingGroup, Kind::kAppliedTwice}) {
    on_two_and_three([&](const RankContext& rank) {
      Twins twins(rank, net_of<Blocks>(kind), {.dtype = torch::kDouble});
      expect_same_training(twins, {.tolerance = 1e-10});
    });
  }
}

class OptimizerParity : public ::testing::TestWithParam<std::tuple<size_t, int>> {};

TEST_P(OptimizerParity, TrainsAsOneProcess) {
  const auto [which, size] = GetParam();
  const auto make = all_optimizers()[which].make;
  run_on_ranks(size, [&](const RankContext& rank) {
    Twins single(rank, net_of<Mlp>(), {.dtype = torch::kFloat});
    expect_same_training(single, {.tolerance = 1e-5, .optimizer = make});
    Twins twice(rank, net_of<Mlp>(), {.dtype = torch::kDouble});
    expect_same_training(twice, {.tolerance = 1e-10, .optimizer = make});
    Twins gpt(rank, net_of<Gpt>(1), {.dtype = torch::kDouble});
    expect_same_training(gpt, {.num_steps = 4, .tolerance = 1e-10, .optimizer = make});
  });
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, OptimizerParity,
                         ::testing::Combine(::testing::Range(size_t{0}, all_optimizers().size()),
                                            ::testing::Values(1, 2, 3, 4)),
                         [](const auto& info) {
                           return all_optimizers()[std::get<0>(info.param)].name + "_" +
                                  std::to_string(std::get<1>(info.param));
                         });

RANKS_BODY(train_in_processes) {
  init_process_group();
  const auto rank = default_rank_context();
  for (const auto& net : {net_of<Mlp>(), net_of<Gpt>()}) {
    Twins twins(rank, net);
    expect_same_training(twins);
  }
  destroy_process_group();
}

TEST(ProcessParity, TrainsAsOneProcess) {
  for (int size : {1, 2, 3, 4}) {
    EXPECT_ALL_RANKS_OK(spawn_ranks(size, "train_in_processes"));
  }
}

// The mean over several plain copies' gradients, written to each of them.
void average_gradients(const std::vector<std::shared_ptr<TestNet>>& copies) {
  for (size_t i = 0; i < copies[0]->parameters().size(); ++i) {
    auto sum = torch::zeros_like(copies[0]->parameters()[i]);
    for (const auto& copy : copies) {
      sum += copy->parameters()[i].grad();
    }
    for (const auto& copy : copies) {
      copy->parameters()[i].mutable_grad() = sum / static_cast<double>(copies.size());
    }
  }
}

// Batch statistics are those of a rank's own part: the reference is one plain copy a rank.
TEST(BatchNormParity, EqualsOneCopyARank) {
  for (int size : {1, 2, 3, 4}) {
    for (auto [dtype, tolerance] : {std::pair(torch::kFloat, 1e-5), std::pair(torch::kDouble, 1e-10)}) {
      run_on_ranks(size, [&, dtype = dtype, tolerance = tolerance](const RankContext& rank) {
        const torch::NoGradGuard no_grad;
        std::vector<std::shared_ptr<TestNet>> copies;
        std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers;
        for (int r = 0; r < rank.size(); ++r) {
          copies.push_back(net_of<ConvNet>()());
          copies.back()->to(dtype);
          optimizers.push_back(sgd()(copies.back()->parameters()));
        }
        auto sharded = net_of<ConvNet>()();
        sharded->to(dtype);
        shard_units(*sharded, rank.mesh);
        auto optimizer = sgd()(sharded->parameters());
        const auto& own = copies[rank.rank()];
        for (int step = 0; step < 10; ++step) {
          const torch::AutoGradMode grad_mode(true);
          double reference = 0;
          for (int r = 0; r < rank.size(); ++r) {
            copies[r]->zero_grad();
            auto loss = copies[r]->loss(copies[r]->batch(3, seeded(100 * step + r)).to(dtype));
            loss.backward();
            reference += loss.item<double>() / rank.size();
          }
          average_gradients(copies);
          sharded->zero_grad();
          auto loss = sharded->loss(sharded->batch(3, seeded(100 * step + rank.rank())).to(dtype));
          loss.backward();
          EXPECT_NEAR(reference, mean_over_ranks(loss, rank.group), tolerance) << "step " << step;
          EXPECT_LE(difference(grads(own->parameters()), grads(sharded->parameters())), tolerance) << "step " << step;
          for (auto& each : optimizers) {
            each->step();
          }
          optimizer->step();
          EXPECT_LE(difference(own->parameters(), sharded->parameters()), tolerance) << "step " << step;
          EXPECT_LE(difference(own->buffers(), sharded->buffers()), tolerance) << "running statistics, step " << step;
        }
      });
    }
  }
}

}  // namespace
}  // namespace fsdp::testing
