// Loading a module: from every rank, from rank 0 alone, and what is refused before anything changes.
#include "support/parity.h"

namespace fsdp::testing {
namespace {

std::shared_ptr<TestNet> other_net(const NetFactory& make) {
  auto net = make();
  fill_parameters(*net, 77);
  return net;
}

void expect_loaded(const TestNet& source, const Twins& twins) {
  EXPECT_LE(difference(source.parameters(), twins.q), 0);
  EXPECT_LE(difference(source.buffers(), twins.sharded->buffers()), 0);
}

TEST(LoadStateDict, WholeTensorsOnEveryRank) {
  for (int size : {1, 2, 3, 4}) {
    run_on_ranks(size, [](const RankContext& rank) {
      Twins twins(rank, net_of<ConvNet>());
      twins.backward();  // gathered copies of the old values exist
      twins.zero_grad();
      const auto source = other_net(net_of<ConvNet>());
      source->forward(source->batch(4, seeded(1)));  // moves the running statistics
      const auto memory = DTensor(twins.q[0]).to_local().const_data_ptr();
      const auto keys = load_state_dict(*twins.sharded, state_dict(*source));
      EXPECT_TRUE(keys.missing_keys.empty() && keys.unexpected_keys.empty());
      EXPECT_EQ(DTensor(twins.q[0]).to_local().const_data_ptr(), memory) << "in place";
      expect_loaded(*source, twins);
      load_state_dict(*twins.plain, state_dict(*source));
      twins.plain->eval();
      twins.sharded->eval();
      twins.backward();
      EXPECT_SAME_GRADS(twins, kClose);
    });
  }
}

TEST(LoadStateDict, ShardsOfTheSameAndOfAnotherLayout) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>()), source(rank, net_of<Mlp>());
    fill_parameters(*source.plain, 77);
    load_state_dict(*source.sharded, state_dict(*source.plain));
    const auto before = twins.stats().num_all_gathers;
    load_state_dict(*twins.sharded, state_dict(*source.sharded));
    load_state_dict(*twins.sharded, state_dict(*twins.sharded));  // its own
    EXPECT_EQ(twins.stats().num_all_gathers, before) << "shard to shard";
    EXPECT_LE(difference(source.p, twins.q), 0);

    StateDict by_columns;
    for (const auto& item : state_dict(*source.plain)) {
      const auto value = item.value() * 2;
      by_columns.insert(item.key(),
                        distribute_tensor(value, rank.mesh, {Shard{value.dim() - 1}}, std::nullopt).tensor());
    }
    load_state_dict(*twins.sharded, by_columns);
    for (size_t i = 0; i < source.p.size(); ++i) {
      EXPECT_LE(difference(source.p[i] * 2, twins.q[i]), 0);
    }
  });
}

TEST(LoadStateDict, IntoTheDtypeAndStridesOfTheModule) {
  for (bool from_rank0 : {false, true}) {
    on_two_and_three([&](const RankContext& rank) {
      torch::nn::Linear net(3, 5);
      fill_parameters(*net, 1);
      fully_shard(net, {.mesh = rank.mesh});
      const auto weight = torch::arange(15.0).view({3, 5}).t();  // [5, 3], not contiguous
      const auto bias = torch::arange(5.0).to(torch::kBFloat16);
      load_state_dict(*net, {{"weight", weight}, {"bias", bias}}, {.broadcast_from_rank0 = from_rank0});
      EXPECT_LE(difference(weight.contiguous(), net->weight), 0);
      EXPECT_LE(difference(torch::arange(5.0), net->bias), 0);
      EXPECT_EQ(net->bias.scalar_type(), torch::kFloat);
    });
  }
}

TEST(LoadStateDict, FromRankZeroAlone) {
  for (int size : {1, 2, 3, 4}) {
    run_on_ranks(size, [](const RankContext& rank) {
      Twins twins(rank, net_of<ConvNet>());
      const auto source = other_net(net_of<ConvNet>());
      source->forward(source->batch(4, seeded(1)));
      load_state_dict(*twins.sharded, rank.rank() == 0 ? state_dict(*source) : StateDict(),
                      {.broadcast_from_rank0 = true});
      expect_loaded(*source, twins);
      load_state_dict(*twins.plain, state_dict(*source));
      twins.plain->eval();  // batch statistics of a part are not those of the whole
      twins.sharded->eval();
      expect_same_training(twins, {.num_steps = 3});
    });
  }
}

// Rows 1, 0, 0, 0 and 2, 2, 1, 0 on four ranks.
TEST(LoadStateDict, FromRankZeroIntoUnevenShards) {
  run_on_ranks(4, [](const RankContext& rank) {
    torch::nn::Module net;
    const auto row = net.register_parameter("row", torch::zeros({1, 17}));
    const auto rows = net.register_parameter("rows", torch::zeros({5, 3}));
    fully_shard(net, {.mesh = rank.mesh});
    StateDict weights;
    if (rank.rank() == 0) {
      weights = {{"row", torch::arange(17.0).view({1, 17})}, {"rows", torch::arange(15.0).view({5, 3})}};
    }
    load_state_dict(net, weights, {.broadcast_from_rank0 = true});
    EXPECT_EQ(DTensor(row).to_local().size(0), rank.rank() == 0 ? 1 : 0);
    EXPECT_EQ(DTensor(rows).to_local().size(0), (std::array{2, 2, 1, 0})[rank.rank()]);
    EXPECT_LE(difference(torch::arange(17.0).view({1, 17}), row), 0);
    EXPECT_LE(difference(torch::arange(15.0).view({5, 3}), rows), 0);
  });
}

TEST(LoadStateDict, SavedOnFourRanksLoadedOnOthers) {
  const auto numbers = [] { return torch::arange(30.0).view({10, 3}); };
  const auto sharded = [](const at::Tensor& values, const RankContext& rank) {
    auto net = std::make_shared<torch::nn::Module>();
    net->register_parameter("weight", values);
    fully_shard(net, {.mesh = rank.mesh});
    return net;
  };
  StateDict saved;
  run_on_ranks(4, [&](const RankContext& rank) {
    auto full = full_state_dict(*sharded(numbers(), rank));
    if (rank.rank() == 0) {
      saved = full;
    }
  });
  for (int size : {1, 2, 3, 8}) {
    run_on_ranks(size, [&](const RankContext& rank) {
      const auto net = sharded(torch::zeros({10, 3}), rank);
      load_state_dict(*net, rank.rank() == 0 ? saved : StateDict(), {.broadcast_from_rank0 = true});
      const auto local = DTensor(net->parameters()[0]).to_local();
      if (size == 3 && rank.rank() == 2) {
        EXPECT_TRUE(torch::equal(local, torch::arange(24.0, 30.0).view({2, 3})));
      }
      if (size == 8) {
        EXPECT_EQ(local.size(0), rank.rank() < 5 ? 2 : 0);
      }
      EXPECT_LE(difference(numbers(), net->parameters()[0]), 0);
    });
  }
}

// Tiny parameters are whole on every rank, at any number of ranks.
TEST(LoadStateDict, WithReplicateBelowAtAnotherWorldSize) {
  const auto wrapped = [](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>(), {.shard = false});
    shard_units(*twins.sharded, {.mesh = rank.mesh, .replicate_below = 14});
    EXPECT_EQ(DTensor(twins.q[1]).to_local().numel(), 13) << "a bias, whole";
    return twins;
  };
  const auto source = other_net(net_of<Mlp>());
  StateDict saved;
  run_on_ranks(4, [&](const RankContext& rank) {
    auto twins = wrapped(rank);
    load_state_dict(*twins.sharded, state_dict(*source));
    auto full = full_state_dict(*twins.sharded);
    if (rank.rank() == 0) saved = full;
  });
  for (const int size : {1, 2, 3}) {
    for (const bool from_rank0 : {false, true}) {
      run_on_ranks(size, [&](const RankContext& rank) {
        auto twins = wrapped(rank);
        load_state_dict(*twins.sharded, from_rank0 && rank.rank() != 0 ? StateDict() : saved,
                        {.broadcast_from_rank0 = from_rank0});
        expect_loaded(*source, twins);
        load_state_dict(*twins.plain, state_dict(*source));
        expect_same_training(twins, {.num_steps = 3, .optimizer = all_optimizers()[1].make});
      });
    }
  }
}

TEST(LoadStateDict, FromRankZeroTakesTheMemoryOfAboutOneTensor) {
  run_on_ranks(4, [](const RankContext& rank) {
    constexpr int64_t kNumParameters = 64, kNumel = 4096, kBytes = kNumel * 4;
    torch::nn::Module net;
    for (int64_t i = 0; i < kNumParameters; ++i) {
      net.register_parameter("p" + std::to_string(i), torch::zeros({kNumel}));
    }
    fully_shard(net, {.mesh = rank.mesh});
    StateDict weights;
    for (int64_t i = 0; rank.rank() == 0 && i < kNumParameters; ++i) {
      weights.insert("p" + std::to_string(i), torch::full({kNumel}, static_cast<double>(i), torch::kDouble));
    }
    reset_peak_memory_stats(net);
    load_state_dict(net, weights, {.broadcast_from_rank0 = true});
    EXPECT_LE(memory_stats(net).buffers.peak, rank.rank() == 0 ? 2 * kBytes : kBytes / 2);
    EXPECT_EQ(memory_stats(net).gathered.peak, 0);
    for (int64_t i = 0; i < kNumParameters; ++i) {
      const auto local = DTensor(net.parameters()[i]).to_local();
      EXPECT_TRUE(torch::equal(local, torch::full({kNumel / 4}, static_cast<double>(i)))) << i;
    }
  });
}

// One rank has what does not fit; all ranks say so, and none has changed.
void expect_refused(const RankContext& rank, const std::function<void(StateDict&)>& damage, int damaged_rank,
                    const std::string& text, const LoadStateDictOptions& options = {}) {
  Twins twins(rank, net_of<Mlp>());
  const auto source = other_net(net_of<Mlp>());
  auto weights = state_dict(*source);
  if (rank.rank() == damaged_rank) {
    damage(weights);
  }
  const auto message = error_of<c10::ValueError>([&] { load_state_dict(*twins.sharded, weights, options); });
  EXPECT_CONTAINS(message, text);
  EXPECT_CONTAINS(message, "rank " + std::to_string(damaged_rank));
  EXPECT_SAME_PARAMETERS(twins, 0);
}

TEST(LoadStateDict, RefusesOnEveryRankBeforeAnythingChanges) {
  on_two_and_three([](const RankContext& rank) {
    for (bool from_rank0 : {false, true}) {
      const LoadStateDictOptions options{.broadcast_from_rank0 = from_rank0};
      const int who = from_rank0 ? 0 : rank.size() - 1;
      expect_refused(
          rank, [](StateDict& w) { w.erase("layers.2.bias"); }, who, "missing: layers.2.bias", options);
      expect_refused(
          rank, [](StateDict& w) { w.insert("extra", torch::ones({1})); }, who, "unexpected: extra", options);
      expect_refused(
          rank,
          [](StateDict& w) {
            w["layers.4.weight"] = torch::ones({5, 3});
          },
          who, "layers.4.weight is [3, 5], the given value [5, 3]", options);
      expect_refused(
          rank, [](StateDict& w) { w["layers.4.bias"] = torch::empty({3}, torch::kMeta); }, who,
          "layers.4.bias is given on the meta device", options);
    }
    expect_refused(rank,
                   [&](StateDict& w) {
                     w["layers.4.bias"] =
                         distribute_tensor(torch::ones({3}), rank.mesh, {Shard{0}}, std::nullopt).tensor();
                   },
                   0, "layers.4.bias is given as a DTensor", {.broadcast_from_rank0 = true});
  });
}

TEST(LoadStateDict, NotStrictLoadsWhatFits) {
  for (bool from_rank0 : {false, true}) {
    on_two_and_three([&](const RankContext& rank) {
      Twins twins(rank, net_of<Mlp>());
      const auto source = other_net(net_of<Mlp>());
      auto weights = state_dict(*source);
      weights.erase("layers.2.bias");
      weights.insert("extra", torch::ones({1}));
      if (from_rank0 && rank.rank() != 0) {
        weights = StateDict();
      }
      const auto keys = load_state_dict(*twins.sharded, weights, {.strict = false, .broadcast_from_rank0 = from_rank0});
      EXPECT_EQ(keys.missing_keys, std::vector<std::string>{"layers.2.bias"});
      EXPECT_EQ(keys.unexpected_keys, std::vector<std::string>{"extra"});
      for (size_t i = 0; i < twins.q.size(); ++i) {
        const auto expected = i == 3 ? twins.p[i] : source->parameters()[i];
        EXPECT_LE(difference(expected, twins.q[i]), 0) << i;
      }
    });
  }
}

TEST(LoadStateDict, OfAPlainModule) {
  const auto source = other_net(net_of<ConvNet>());
  auto net = net_of<ConvNet>()();
  load_state_dict(*net, state_dict(*source));
  EXPECT_LE(difference(source->parameters(), net->parameters()), 0);
  EXPECT_THROW(load_state_dict(*net, StateDict()), c10::ValueError);
  EXPECT_CONTAINS(
      error_of<c10::ValueError>([&] { load_state_dict(*net, state_dict(*source), {.broadcast_from_rank0 = true}); }),
      "fully_shard");
}

}  // namespace
}  // namespace fsdp::testing
