// State dicts of a module: live shards, whole tensors on rank 0, the stream behind them.
#include "support/parity.h"

namespace fsdp::testing {
namespace {

using Names = std::vector<std::string>;

// What PyTorch's state_dict() of the plain net holds.
StateDict plain_values(const torch::nn::Module& net) {
  const auto live = state_dict(net);
  StateDict copy;
  for (const auto& item : live) {
    copy.insert(item.key(), item.value().clone());
  }
  return copy;
}

void expect_same_values(const StateDict& expected, const StateDict& actual) {
  ASSERT_EQ(expected.keys(), actual.keys());
  for (const auto& item : expected) {
    EXPECT_LE(difference(item.value(), actual[item.key()]), 0) << item.key();
  }
}

TEST(StateDicts, NamesAndOrderAreThoseOfPyTorch) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, net_of<ConvNet>());
    const auto names = state_dict(*twins.sharded).keys();
    EXPECT_EQ(names, state_dict(*twins.plain).keys());
    // The buffers of a BatchNorm follow its own parameters, before the next module.
    const auto place = [&](const std::string& name) {
      return std::find(names.begin(), names.end(), name) - names.begin();
    };
    EXPECT_EQ(place("first.1.running_mean"), place("first.1.bias") + 1);
    EXPECT_LT(place("first.1.running_var"), place("second.0.weight"));
  });
}

TEST(StateDicts, ValuesAreLiveShards) {
  for (int size : {1, 2, 3, 4}) {
    run_on_ranks(size, [](const RankContext& rank) {
      Twins twins(rank, net_of<Mlp>());
      const auto before = twins.stats();
      const auto weights = state_dict(*twins.sharded);
      EXPECT_EQ(twins.stats().num_meetings, before.num_meetings);
      for (const auto& item : twins.sharded->named_parameters()) {
        const auto& value = weights[item.key()];
        ASSERT_TRUE(DTensor::is(value)) << item.key();
        EXPECT_FALSE(value.requires_grad()) << item.key();
        EXPECT_TRUE(DTensor(value).to_local().is_alias_of(DTensor(item.value()).to_local())) << item.key();
      }
      // A cached dict follows the steps after it.
      expect_same_training(twins, {.num_steps = 2});
      EXPECT_LE(difference(twins.p[0], weights["layers.0.weight"]), 1e-5);
    });
  }
}

TEST(StateDicts, AreShardsWhileTheModuleIsGathered) {  // behaviours 133
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp(), {.reshard_after_forward = false});
    twins.both([](TestNet& net, const at::Tensor& x) { net.forward(x); });
    const auto weights = state_dict(*twins.sharded);
    const auto rows = rank.size() == 2 ? 8 : (rank.rank() < 2 ? 6 : 4);
    EXPECT_EQ(DTensor(weights["layers.0.weight"]).to_local().size(0), rows);
    const auto full = full_state_dict(*twins.sharded);
    if (rank.rank() == 0) {
      expect_same_values(plain_values(*twins.plain), full);
    }
  });
}

TEST(StateDicts, RoundTripInPlaceOverManySizes) {  // behaviours 131
  on_two_and_three([](const RankContext& rank) {
    for (const int64_t dim : {2, 3, 4, 5}) {
      for (const bool reshard : {true, false}) {
        Twins twins(rank, net_of<Mlp>(dim, 4 * dim, dim, dim), {.reshard_after_forward = reshard});
        (void)twins.sharded->forward(twins.part);
        const auto weights = state_dict(*twins.sharded);
        EXPECT_EQ(weights.keys(), state_dict(*twins.plain).keys());
        std::vector<const void*> memory;
        for (const auto& parameter : twins.q) memory.push_back(DTensor(parameter).to_local().const_data_ptr());
        StateDict changed;
        for (const auto& item : weights) changed.insert(item.key(), item.value().clone() + 1);
        load_state_dict(*twins.sharded, changed);
        for (size_t i = 0; i < twins.q.size(); ++i) {
          EXPECT_EQ(DTensor(twins.q[i]).to_local().const_data_ptr(), memory[i]) << dim << ", parameter " << i;
          EXPECT_LE(difference(twins.p[i] + 1, twins.q[i]), 0) << dim << ", parameter " << i;
        }
      }
    }
  });
}

TEST(StateDicts, UnderMixedPrecisionAreTheMasters) {  // behaviours 138
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>(), {.shard = false});
    shard_units(*twins.sharded,
                {.mesh = rank.mesh, .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    twins.sharded->loss(twins.part).backward();  // gathered copies in bf16 were there
    for (const auto& item : state_dict(*twins.sharded)) EXPECT_EQ(item.value().scalar_type(), at::kFloat) << item.key();
    const auto full = full_state_dict(*twins.sharded);
    if (rank.rank() == 0) expect_same_values(plain_values(*twins.plain), full);
  });
}

TEST(StateDicts, TiesKeepBothNames) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Gpt>(1, /*tied=*/true));
    const auto weights = state_dict(*twins.sharded);
    ASSERT_TRUE(weights.contains("token.weight") && weights.contains("head.weight"));
    EXPECT_TRUE(DTensor(weights["token.weight"]).to_local().is_alias_of(DTensor(weights["head.weight"]).to_local()));
    const auto whole_weights = full_state_dict(*twins.sharded);
    if (rank.rank() == 0) {
      EXPECT_EQ(whole_weights.keys(), weights.keys());
      EXPECT_TRUE(whole_weights["token.weight"].is_same(whole_weights["head.weight"])) << "gathered once";
    }
  });
}

TEST(StateDicts, OnTwoMeshDims) {  // behaviours 134
  run_on_ranks(4, [](const RankContext& rank) {
    RankContext grid = rank;
    grid.mesh = mesh_2d(rank, 2, 2, "grid");
    Twins twins(grid, net_of<ConvNet>(), {.shard = false});
    shard_units(*twins.sharded, grid.mesh);
    const auto weights = state_dict(*twins.sharded);
    EXPECT_EQ(DTensor(weights["out.weight"]).placements(), (Placements{Replicate{}, Shard{0}}));
    const auto full = full_state_dict(*twins.sharded);
    EXPECT_EQ(full.is_empty(), rank.rank() != 0);
    if (rank.rank() == 0) {
      expect_same_values(plain_values(*twins.plain), full);
    }
    StateDict doubled;
    for (const auto& item : weights) doubled.insert(item.key(), item.value() * 2);
    load_state_dict(*twins.sharded, doubled);
    for (size_t i = 0; i < twins.q.size(); ++i) EXPECT_LE(difference(twins.p[i] * 2, twins.q[i]), 0);
    // Loading from rank 0 alone reaches the replicas too.
    auto source = net_of<ConvNet>()();
    fill_parameters(*source, 77);
    load_state_dict(*twins.sharded, rank.rank() == 0 ? plain_values(*source) : StateDict(),
                    {.broadcast_from_rank0 = true});
    EXPECT_LE(own_difference(source->parameters(), twins.q), 0);
  });
}

// Experts on ranks {0, 1} and {2, 3} below a root over all four: no rank can hold all, which ranks 0 and 1 do not see.
TEST(StateDicts, MeshesThatStartDifferentlyAreRefusedOnEveryRank) {
  run_on_ranks(4, [](const RankContext& rank) {
    torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
    fill_parameters(*net, 1);
    fully_shard(net->ptr(0), {.mesh = mesh_2d(rank, 2, 2, "experts", {"pipeline", "expert"})["expert"]});
    fully_shard(net, {.mesh = rank.mesh});
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    const auto expect_refused = [](const std::function<void()>& call) {
      EXPECT_CONTAINS(error_of<c10::NotImplementedError>(call), "meshes that start with different ranks (0, 2)");
    };
    const LoadStateDictOptions from_rank0{.broadcast_from_rank0 = true};
    expect_refused([&] { (void)full_state_dict(*net); });
    expect_refused([&] { save_full_state_dict(*net, "/no/such/folder/model.pt"); });
    expect_refused([&] { load_state_dict(*net, StateDict(), from_rank0); });
    expect_refused([&] { (void)full_optimizer_state_dict(*net, optimizer); });
    expect_refused([&] { load_optimizer_state_dict(*net, optimizer, OptimizerStateDict(), from_rank0); });
    load_state_dict(*net, state_dict(*net));  // shards need no such rank
  });
}

TEST(StateDicts, FullIsASnapshot) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, net_of<ConvNet>());
    const auto full = full_state_dict(*twins.sharded);
    const auto expected = plain_values(*twins.plain);
    const torch::NoGradGuard no_grad;
    twins.sharded->parameters()[0].zero_();
    twins.sharded->buffers()[0].fill_(7);
    if (rank.rank() == 0) {
      expect_same_values(expected, full);
    }
  });
}

TEST(Stream, GivesWholeTensorsOneAtATime) {
  for (int size : {1, 2, 3, 4}) {
    run_on_ranks(size, [](const RankContext& rank) {
      constexpr int64_t kNumLayers = 8, kRows = 16, kColumns = 64, kBytes = kRows * kColumns * 4;
      torch::nn::Module net;
      for (int64_t i = 0; i < kNumLayers; ++i) {
        net.register_parameter("p" + std::to_string(i), torch::full({kRows, kColumns}, static_cast<double>(i)));
      }
      fully_shard(net, {.mesh = rank.mesh});
      reset_peak_memory_stats(net);
      Names names;
      stream_full_state_dict(net, [&](const std::string& name, const at::Tensor& tensor) {
        EXPECT_TRUE(torch::equal(tensor, torch::full({kRows, kColumns}, static_cast<double>(names.size()))));
        names.push_back(name);
      });
      EXPECT_EQ(names.size(), rank.rank() == 0 ? kNumLayers : 0);
      const auto stats = memory_stats(net);
      EXPECT_LE(stats.buffers.peak, 2 * kBytes) << "about one tensor, whatever the model holds";
      EXPECT_EQ(stats.buffers.current, 0);
      EXPECT_EQ(stats.gathered.peak, 0) << "no group is gathered for it";
    });
  }
}

TEST(Stream, WhatTheSinkThrowsEndsItOnEveryRank) {
  for (int size : {1, 2, 3}) {
    run_on_ranks(size, [](const RankContext& rank) {
      Twins twins(rank, net_of<ConvNet>());
      int num_calls = 0;
      const auto sink = [&](const std::string&, const at::Tensor&) {
        if (++num_calls == 3) {
          throw std::runtime_error("the disk is full");
        }
      };
      const auto message = error_of<std::exception>([&] { stream_full_state_dict(*twins.sharded, sink); });
      EXPECT_CONTAINS(message, "the disk is full");
      EXPECT_EQ(num_calls, rank.rank() == 0 ? 3 : 0);
      if (rank.rank() != 0) {
        EXPECT_CONTAINS(message, "rank 0");
      }
      twins.plain->eval();
      twins.sharded->eval();
      twins.backward();  // the ranks are in step
      EXPECT_SAME_GRADS(twins, kClose);
    });
  }
}

}  // namespace
}  // namespace fsdp::testing
