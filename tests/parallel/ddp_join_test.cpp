// DistributedDataParallel::join: unequal numbers of batches, as one process that takes in each step those that are
// there.
#include <fsdp/distributed_data_parallel.h>

#include "support/errors.h"
#include "support/parity.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kRowsOfRank = 2;

at::Tensor join_batch(int64_t step, int64_t rank) {
  return torch::empty({kRowsOfRank, 7}).normal_(0, 1, seeded(100 * step + rank));
}

struct JoinCase {
  std::vector<int64_t> num_batches;  // of each rank
  JoinOptions join = {};
  bool find_unused_parameters = false;
  OptimizerFactory make_optimizer = sgd();
  int num_epochs = 1;
};

std::shared_ptr<TestNet> trained_by_one_process(const JoinCase& test) {
  const auto net = net_of<Mlp>()();
  const auto optimizer = test.make_optimizer(net->parameters());
  const auto num_ranks = static_cast<int64_t>(test.num_batches.size());
  const auto num_steps = *std::max_element(test.num_batches.begin(), test.num_batches.end());
  for (int64_t i = 0; i < test.num_epochs * num_steps; ++i) {
    const auto step = i % num_steps;
    const auto num_active =
        std::count_if(test.num_batches.begin(), test.num_batches.end(), [step](int64_t n) { return step < n; });
    const auto divisor = test.join.divide_by_initial_world_size ? num_ranks : num_active;
    for (int64_t rank = 0; rank < num_ranks; ++rank)
      if (step < test.num_batches[rank]) (net->forward(join_batch(step, rank)).square().mean() / divisor).backward();
    optimizer->step();
    optimizer->zero_grad();
  }
  return net;
}

// An optimizer that missed steps goes on with the state of one that made them all.
void hand_state_on(const RankContext& rank, const JoinCase& test, int epoch, torch::optim::Optimizer& optimizer) {
  const auto key = c10::str("state after epoch ", epoch);
  const auto most = std::max_element(test.num_batches.begin(), test.num_batches.end()) - test.num_batches.begin();
  std::stringstream bytes;
  if (rank.rank() == most) {
    torch::save(optimizer, bytes);
    const auto text = bytes.str();
    rank.store->set(key, std::vector<uint8_t>(text.begin(), text.end()));
    return;
  }
  const auto saved = rank.store->get(key);
  bytes.str(std::string(saved.begin(), saved.end()));
  torch::load(optimizer, bytes);
}

void expect_joined_as_one_process(const JoinCase& test, double tolerance = kClose) {
  run_on_ranks(static_cast<int>(test.num_batches.size()), [&](const RankContext& rank) {
    const auto net = net_of<Mlp>()();
    DistributedDataParallel ddp(
        net, {.mesh = rank.mesh, .bucket_cap_mb = 1e-6, .find_unused_parameters = test.find_unused_parameters});
    const auto optimizer = test.make_optimizer(ddp->parameters());
    for (int epoch = 0; epoch < test.num_epochs; ++epoch) {
      ddp->join(
          [&] {
            for (int64_t step = 0; step < test.num_batches[rank.rank()]; ++step) {
              ddp->forward(join_batch(step, rank.rank())).square().mean().backward();
              optimizer->step();
              optimizer->zero_grad();
            }
          },
          test.join);
      hand_state_on(rank, test, epoch, *optimizer);
    }
    EXPECT_LE(difference(trained_by_one_process(test)->parameters(), net->parameters()), tolerance);
  });
}

TEST(DdpJoin, UnequalBatchesAsOneProcess) {  // behaviours 153
  for (const bool by_world_size : {false, true}) {
    const JoinOptions join{.divide_by_initial_world_size = by_world_size};
    expect_joined_as_one_process({{5, 7}, join});
    expect_joined_as_one_process({{3, 1, 4}, join});
    expect_joined_as_one_process({{0, 2}, join});
    expect_joined_as_one_process({{2, 2}, join});
    expect_joined_as_one_process({{1, 4}, join, /*find_unused_parameters=*/true});
  }
}

TEST(DdpJoin, OptimizersThatMissedStepsTakeTheStateOfAnother) {
  const OptimizerFactory adamw = [](std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::AdamW>(std::move(parameters), torch::optim::AdamWOptions(0.01));
  };
  expect_joined_as_one_process({.num_batches = {1, 3}, .make_optimizer = adamw, .num_epochs = 3}, /*tolerance=*/1e-5);
}

TEST(DdpJoin, ThenTrainsOn) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>(), {.shard = false});
    DistributedDataParallel ddp(twins.sharded, {.mesh = rank.mesh});
    for (int epoch = 0; epoch < 2; ++epoch) {
      ddp->join([&] {
        for (int step = 0; step < 1 + rank.rank(); ++step) {
          ddp->forward(twins.part).square().mean().backward();
          ddp->zero_grad();
        }
      });
    }
    ddp->forward(twins.part).square().mean().backward();
    twins.plain->loss(twins.joined).backward();
    EXPECT_SAME_GRADS(twins, kClose) << "divided by all ranks again";
  });
}

TEST(DdpJoin, BuffersComeFromARankThatWasLast) {
  run_on_ranks(3, [](const RankContext& rank) {
    torch::nn::BatchNorm1d norm(3);
    torch::nn::Sequential net(torch::nn::Linear(4, 3), norm);
    DistributedDataParallel ddp(net, {.mesh = rank.mesh});
    at::Tensor last;
    const int64_t num_batches = rank.rank() == 1 ? 3 : 1;
    ddp->join([&] {
      for (int64_t step = 0; step < num_batches; ++step) {
        const auto output = ddp->forward(torch::empty({4, 4}).normal_(0, 1, seeded(10 * step + rank.rank())));
        output.square().mean().backward();
        last = norm->running_mean.clone();
      }
    });
    std::vector<at::Tensor> sent{last.clone()};
    c10d::BroadcastOptions from;
    from.rootRank = 1;
    rank.group->broadcast(sent, from)->wait();
    EXPECT_TRUE(at::equal(norm->running_mean, sent.front()));
    EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 3);
  });
}

TEST(DdpJoin, AccumulatesWithoutSync) {
  run_on_ranks(2, [](const RankContext& rank) {
    const auto net = net_of<Mlp>()(), plain = net_of<Mlp>()();
    DistributedDataParallel ddp(net, {.mesh = rank.mesh});
    ddp->join([&] {
      if (rank.rank() == 0) return;
      {
        const auto scope = ddp->no_sync();
        ddp->forward(join_batch(0, 1)).square().mean().backward();
      }
      ddp->forward(join_batch(1, 1)).square().mean().backward();
      for (int64_t step = 0; step < 2; ++step) plain->forward(join_batch(step, 1)).square().mean().backward();
      EXPECT_LE(difference(grads(plain->parameters()), grads(net->parameters())), kClose);
    });
  });
}

TEST(DdpJoin, EarlyTerminationRaisesOnEveryRank) {
  run_on_ranks(2, [](const RankContext& rank) {
    DistributedDataParallel ddp(net_of<Mlp>()(), {.mesh = rank.mesh});
    const auto message = error_of([&] {
      ddp->join(
          [&] {
            for (int step = 0; step < 2 + rank.rank(); ++step)
              ddp->forward(join_batch(step, rank.rank())).square().mean().backward();
          },
          {.throw_on_early_termination = true});
    });
    EXPECT_CONTAINS(message, "1 of 2 ranks ran out of data");
  });
}

TEST(DdpJoin, Misuse) {
  run_on_ranks(2, [](const RankContext& rank) {
    DistributedDataParallel fixed(net_of<Mlp>()(), {.mesh = rank.mesh, .static_graph = true});
    EXPECT_CONTAINS(error_of<c10::NotImplementedError>([&] { fixed->join([] {}); }), "static_graph");
    DistributedDataParallel sparse(torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 3).sparse(true)),
                                   {.mesh = rank.mesh});
    EXPECT_CONTAINS(error_of<c10::NotImplementedError>([&] { sparse->join([] {}); }),
                    "parameter 'weight' has a sparse gradient");
    DistributedDataParallel ddp(net_of<Mlp>()(), {.mesh = rank.mesh});
    EXPECT_CONTAINS(error_of([&] { ddp->join([&] { ddp->join([] {}); }); }), "join inside join");
    EXPECT_THROW(ddp->join([] { throw std::runtime_error("of the loop"); }), std::runtime_error);
    const auto differs = error_of([&] {
      ddp->join([&] {
        std::optional<NoSync> scope;
        if (rank.rank() == 0) scope.emplace(ddp->no_sync());
        ddp->forward(join_batch(0, 0));
      });
    });
    EXPECT_CONTAINS(differs, "some ranks average gradients and others do not");
  });
}

}  // namespace
}  // namespace fsdp::testing
