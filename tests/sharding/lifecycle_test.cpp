// Several models, several threads, models dropped and built again.
#include <thread>

#include "support/parity.h"

namespace fsdp::testing {
namespace {

TEST(Lifecycle, TwoModelsInTwoThreads) {
  run_on_ranks(2, [](const RankContext& rank) {
    std::vector<std::thread> threads;
    for (int which = 0; which < 2; ++which) {
      threads.emplace_back([&rank, which] {
        const auto store = c10::make_intrusive<c10d::PrefixStore>("model" + std::to_string(which), rank.store);
        RankContext own = rank;
        own.group = make_process_group(store, rank.rank(), rank.size(), {.timeout = std::chrono::seconds(30)});
        own.mesh = DeviceMesh::from_group(own.group, torch::kCPU, {"dp"});
        Twins twins(own, which == 0 ? net_of<Mlp>() : net_of<Blocks>(), {.dtype = torch::kDouble});
        expect_same_training(twins, {.num_steps = 20, .tolerance = 1e-10, .optimizer = all_optimizers()[5].make});
      });
    }
    for (auto& thread : threads) {
      thread.join();
    }
  });
}

TEST(Lifecycle, TwoModelsTrainedInTurnsLikeAGan) {
  on_two_and_three([](const RankContext& rank) {
    Twins generator(rank, net_of<Mlp>(7, 13, 5, 6)), critic(rank, net_of<Mlp>(6, 11, 5, 1));
    auto generator_p = sgd()(generator.p), generator_q = sgd()(generator.q);
    auto critic_p = sgd()(critic.p), critic_q = sgd()(critic.q);
    for (int step = 0; step < 5; ++step) {
      const auto one_step = [](TestNet& g, TestNet& c, const at::Tensor& x, torch::optim::Optimizer& og,
                               torch::optim::Optimizer& oc) {
        c.zero_grad();
        c.forward(g.forward(x).detach()).sigmoid().mean().backward();
        oc.step();
        g.zero_grad();
        (-c.forward(g.forward(x))).sigmoid().mean().backward();
        og.step();
      };
      one_step(*generator.plain, *critic.plain, generator.joined, *generator_p, *critic_p);
      one_step(*generator.sharded, *critic.sharded, generator.part, *generator_q, *critic_q);
      EXPECT_SAME_GRADS(generator, kClose);
      EXPECT_SAME_GRADS(critic, kClose);
      EXPECT_SAME_PARAMETERS(generator, kClose);
      EXPECT_SAME_PARAMETERS(critic, kClose);
    }
  });
}

TEST(Lifecycle, ModelsAreDroppedAndBuiltAgain) {
  run_on_ranks(2, [](const RankContext& rank) {
    for (int round = 0; round < 10; ++round) {
      Twins twins(rank, net_of<Mlp>());
      twins.backward();
      EXPECT_SAME_GRADS(twins, kClose);
    }
  });
}

TEST(Lifecycle, DroppedTemporariesNeverCountAsWrapped) {  // behaviours 29, R02
  run_on_ranks(2, [](const RankContext& rank) {
    Blocks net;
    for (auto& block : net.blocks) {
      for (int i = 0; i < 25; ++i) {  // their addresses are used again
        torch::nn::Linear temporary(16, 16);
        fill_parameters(*temporary, 3);
        fully_shard(temporary, {.mesh = rank.mesh});
        EXPECT_TRUE(is_fsdp(*temporary));
      }
      torch::nn::Linear later(16, 16);
      EXPECT_FALSE(is_fsdp(*later));
      EXPECT_FALSE(DTensor::is(later->weight));
      fill_parameters(*block, 4);
      fully_shard(*block, {.mesh = rank.mesh});
      EXPECT_TRUE(DTensor::is(block->first->weight));
    }
  });
}

TEST(Lifecycle, MemoryOfADroppedModelIsGivenBack) {
  run_on_ranks(2, [](const RankContext& rank) {
    c10::weak_intrusive_ptr<c10::StorageImpl> shard(at::Storage::create_legacy(torch::kCPU).getWeakStorageImpl());
    {
      Twins twins(rank, net_of<Mlp>());
      auto optimizer = all_optimizers()[4].make(twins.q);
      for (int step = 0; step < 2; ++step) {
        twins.sharded->loss(twins.part).backward();
        optimizer->step();
      }
      shard = DTensor(twins.q[0]).to_local().storage().getWeakStorageImpl();
      EXPECT_FALSE(shard.expired());
    }
    EXPECT_TRUE(shard.expired());
  });
}

TEST(Lifecycle, ModelDroppedBeforeBackward) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    auto loss_p = twins.plain->loss(twins.joined), loss_q = twins.sharded->loss(twins.part);
    twins.sharded.reset();
    loss_p.backward();
    loss_q.backward();
    EXPECT_SAME_GRADS(twins, kClose);  // of the handles that twins still holds
  });
}

TEST(Lifecycle, EverythingDroppedBeforeBackward) {
  run_on_ranks(2, [](const RankContext& rank) {
    const auto x = torch::ones({2, 7}, torch::requires_grad());
    at::Tensor loss;
    {
      auto net = net_of<Mlp>()();
      shard_units(*net, rank.mesh);
      loss = net->loss(x);
    }
    loss.backward();
    auto plain = net_of<Mlp>()();
    const auto same = torch::ones({2, 7}, torch::requires_grad());
    plain->loss(same).backward();
    EXPECT_LE(difference(same.grad(), x.grad()), kClose);
  });
}

TEST(Lifecycle, UnshardAndReshardByHand) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    auto unit = FSDPModule::of(*Twins::as<Mlp>(*twins.sharded).layers->ptr(0));
    const auto before = twins.stats();
    unit.unshard();
    unit.unshard();
    EXPECT_EQ(twins.stats().num_all_gathers, before.num_all_gathers + 1);
    EXPECT_GT(twins.stats().gathered.current, 0);
    EXPECT_SAME_PARAMETERS(twins, 0);
    EXPECT_LE(difference(twins.p[0].relu(), twins.q[0].relu()), 0) << "read from what is gathered";  // behaviours 61
    unit.reshard();
    unit.reshard();
    EXPECT_EQ(twins.stats().gathered.current, 0);
    unit.unshard();
    twins.backward();
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

}  // namespace
}  // namespace fsdp::testing
