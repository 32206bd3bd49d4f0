// Optimizer state by parameter name: out, in, across world sizes, and from before wrapping.
#include "support/parity.h"
#include "support/scratch_directory.h"

namespace fsdp::testing {
namespace {

using Optimizer = std::unique_ptr<torch::optim::Optimizer>;

void train_step(TestNet& net, torch::optim::Optimizer& optimizer, const at::Tensor& x) {
  optimizer.zero_grad();
  net.loss(x).backward();
  optimizer.step();
}

// Sharded values are compared whole, so that every rank takes part.
void expect_same_state(const OptimizerStateDict& expected, const OptimizerStateDict& actual, double tolerance) {
  ASSERT_EQ(expected.state.keys(), actual.state.keys());
  for (const auto& parameter : expected.state) {
    const auto& values = actual.state[parameter.key()];
    ASSERT_EQ(parameter.value().keys(), values.keys()) << parameter.key();
    for (const auto& item : parameter.value()) {
      const auto name = item.key() + " of " + parameter.key();
      if (item.value().isTensor()) {
        EXPECT_LE(difference(item.value().toTensor(), values[item.key()].toTensor()), tolerance) << name;
      } else {
        EXPECT_EQ(item.value(), values[item.key()]) << name;
      }
    }
  }
  ASSERT_EQ(expected.param_groups.size(), actual.param_groups.size());
  for (size_t g = 0; g < expected.param_groups.size(); ++g) {
    EXPECT_EQ(expected.param_groups[g].params, actual.param_groups[g].params);
    for (const auto& option : expected.param_groups[g].options) {
      EXPECT_EQ(option.value(), actual.param_groups[g].options[option.key()]) << option.key();
    }
  }
}

class EveryOptimizer : public ::testing::TestWithParam<size_t> {
 protected:
  [[nodiscard]] static Optimizer make(const std::vector<at::Tensor>& parameters) {
    return all_optimizers()[GetParam()].make(parameters);
  }
};

TEST_P(EveryOptimizer, StateIsThatOfOneProcess) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    const auto plain = make(twins.p), sharded = make(twins.q);
    for (int step = 0; step < 3; ++step) {
      train_step(*twins.plain, *plain, twins.joined);
      train_step(*twins.sharded, *sharded, twins.part);
    }
    const auto expected = optimizer_state_dict(*twins.plain, *plain);
    const auto live = optimizer_state_dict(*twins.sharded, *sharded);
    expect_same_state(expected, live, 1e-5);
    for (const auto& parameter : live.state) {
      for (const auto& item : parameter.value()) {
        EXPECT_TRUE(!item.value().isTensor() || DTensor::is(item.value().toTensor())) << parameter.key();
      }
    }
    const auto full = full_optimizer_state_dict(*twins.sharded, *sharded);
    if (rank.rank() == 0) {
      expect_same_state(full, full_optimizer_state_dict(*twins.plain, *plain), 1e-5);
    } else {
      EXPECT_TRUE(full.state.is_empty() && full.param_groups.empty());
    }
  });
}

// Saved at one world size, loaded at another: the next step is that of the unbroken run.
TEST_P(EveryOptimizer, GoesOnAtAnotherWorldSize) {
  for (const bool from_rank0 : {false, true}) {
    StateDict weights;
    OptimizerStateDict state;
    run_on_ranks(3, [&](const RankContext& rank) {
      Twins twins(rank, net_of<Mlp>(), {.rows_per_rank = 2});
      const auto optimizer = make(twins.q);
      for (int step = 0; step < 3; ++step) {
        train_step(*twins.sharded, *optimizer, twins.part);
      }
      auto full = full_state_dict(*twins.sharded);
      auto full_optimizer = full_optimizer_state_dict(*twins.sharded, *optimizer);
      if (rank.rank() == 0) {
        weights = full;
        state = full_optimizer;
      }
    });
    for (int size : {1, 2, 4}) {
      run_on_ranks(size, [&](const RankContext& rank) {
        Twins twins(rank, net_of<Mlp>());
        const bool has_values = !from_rank0 || rank.rank() == 0;
        const LoadStateDictOptions options{.broadcast_from_rank0 = from_rank0};
        const auto plain = make(twins.p), sharded = make(twins.q);
        load_state_dict(*twins.plain, weights);
        load_optimizer_state_dict(*twins.plain, *plain, state);
        load_state_dict(*twins.sharded, has_values ? weights : StateDict(), options);
        load_optimizer_state_dict(*twins.sharded, *sharded, has_values ? state : OptimizerStateDict(), options);
        expect_same_state(state, optimizer_state_dict(*twins.sharded, *sharded), 0);
        for (int step = 0; step < 2; ++step) {
          train_step(*twins.plain, *plain, twins.joined);
          train_step(*twins.sharded, *sharded, twins.part);
        }
        EXPECT_SAME_PARAMETERS(twins, 1e-5);
      });
    }
  }
}

// The optimizer stepped on the plain module, or came from a plain file: cut its state, and training goes on.
TEST_P(EveryOptimizer, StateFromBeforeWrappingIsCut) {
  const ScratchDirectory scratch;
  {
    auto net = net_of<Mlp>()();
    const auto optimizer = make(net->parameters());
    train_step(*net, *optimizer, net->batch(4, seeded(1)));
    torch::save(net, scratch.file("net.pt"));
    torch::save(*optimizer, scratch.file("optimizer.pt"));
  }
  on_two_and_three([&](const RankContext& rank) {
    for (const bool from_file : {false, true}) {
      Twins twins(rank, net_of<Mlp>(), {.shard = false});
      const auto plain = make(twins.p), sharded = make(twins.q);
      if (from_file) {
        shard_units(*twins.sharded, rank.mesh);
        torch::load(twins.plain, scratch.file("net.pt"));
        torch::load(twins.sharded, scratch.file("net.pt"));
        torch::load(*plain, scratch.file("optimizer.pt"));
        torch::load(*sharded, scratch.file("optimizer.pt"));
      } else {
        train_step(*twins.plain, *plain, twins.joined);
        train_step(*twins.sharded, *sharded, twins.joined);
        shard_units(*twins.sharded, rank.mesh);
      }
      const auto meetings = twins.stats().num_meetings;
      shard_optimizer_state(*twins.sharded, *sharded);
      shard_optimizer_state(*twins.sharded, *sharded);  // nothing is left to do
      EXPECT_EQ(twins.stats().num_meetings, meetings);
      for (const auto& parameter : optimizer_state_dict(*twins.sharded, *sharded).state) {
        for (const auto& item : parameter.value()) {
          EXPECT_TRUE(!item.value().isTensor() || DTensor::is(item.value().toTensor())) << item.key();
        }
      }
      for (int step = 0; step < 2; ++step) {
        train_step(*twins.plain, *plain, twins.joined);
        train_step(*twins.sharded, *sharded, twins.part);
      }
      EXPECT_SAME_PARAMETERS(twins, 1e-5);
      expect_same_state(optimizer_state_dict(*twins.plain, *plain), optimizer_state_dict(*twins.sharded, *sharded),
                        1e-5);
    }
  });
}

// Forgetting shard_optimizer_state() is an error, or for SGD one warning a parameter; never silent.
TEST_P(EveryOptimizer, WholeStateIsNotKeptInSilence) {
  run_on_ranks(2, [](const RankContext& rank) {
    struct Collect : c10::WarningHandler {
      void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
      std::vector<std::string> texts;
    } collect;
    const c10::WarningUtils::WarningHandlerGuard guard(&collect);
    const auto name = all_optimizers()[GetParam()].name;
    Twins twins(rank, net_of<Mlp>(), {.shard = false});
    const auto plain = make(twins.p), sharded = make(twins.q);
    train_step(*twins.plain, *plain, twins.joined);
    train_step(*twins.sharded, *sharded, twins.joined);
    shard_units(*twins.sharded, rank.mesh);
    if (name.starts_with("SGD")) {
      for (int step = 0; step < 2; ++step) {
        train_step(*twins.plain, *plain, twins.joined);
        train_step(*twins.sharded, *sharded, twins.part);
      }
      EXPECT_SAME_PARAMETERS(twins, 1e-5);
      EXPECT_EQ(collect.texts.size(), name == "SGD" ? 0 : twins.q.size()) << "once a parameter";
      for (const auto& text : collect.texts) {
        EXPECT_CONTAINS(text, "fsdp::shard_optimizer_state");
      }
      return;
    }
    const auto message = error_of([&] { train_step(*twins.sharded, *sharded, twins.part); });
    EXPECT_CONTAINS(message, "'layers.0.weight'");
    EXPECT_CONTAINS(message, "fsdp::shard_optimizer_state");
  });
}

INSTANTIATE_TEST_SUITE_P(All, EveryOptimizer, ::testing::Range(size_t{0}, all_optimizers().size()),
                         [](const auto& info) { return all_optimizers()[info.param].name; });

TEST(OptimizerState, IsLiveAndKeepsItsMemoryWhenLoaded) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    torch::optim::Adam optimizer(twins.q, torch::optim::AdamOptions(1e-2));
    train_step(*twins.sharded, optimizer, twins.part);
    const auto live = optimizer_state_dict(*twins.sharded, optimizer);
    const auto moment = [&] { return DTensor(live.state["layers.0.weight"]["exp_avg"].toTensor()).to_local(); };
    const auto before = moment().clone();
    train_step(*twins.sharded, optimizer, twins.part);
    EXPECT_FALSE(torch::equal(before, moment()));
    const auto whole_state = full_optimizer_state_dict(*twins.sharded, optimizer);
    const auto memory = moment().const_data_ptr();
    load_optimizer_state_dict(*twins.sharded, optimizer, live);  // its own
    load_optimizer_state_dict(*twins.sharded, optimizer, whole_state, {.broadcast_from_rank0 = true});
    const auto now = optimizer_state_dict(*twins.sharded, optimizer);
    EXPECT_EQ(DTensor(now.state["layers.0.weight"]["exp_avg"].toTensor()).to_local().const_data_ptr(), memory);
  });
}

TEST(OptimizerState, FindsGroupsByNameAndTakesTheirOptions) {
  on_two_and_three([](const RankContext& rank) {
    using torch::optim::AdamWOptions;
    using torch::optim::OptimizerParamGroup;
    Twins twins(rank, net_of<Mlp>());
    const auto& q = twins.q;
    const auto group = [](std::vector<at::Tensor> parameters, double lr) {
      return OptimizerParamGroup(std::move(parameters), std::make_unique<AdamWOptions>(lr));
    };
    torch::optim::AdamW saved({group({q[0], q[2], q[4]}, 0.5), group({q[1], q[3], q[5]}, 0.25)}, AdamWOptions(1e-3));
    train_step(*twins.sharded, saved, twins.part);
    const auto state = optimizer_state_dict(*twins.sharded, saved);
    EXPECT_EQ(state.param_groups[1].params,
              (std::vector<std::string>{"layers.0.bias", "layers.2.bias", "layers.4.bias"}));
    EXPECT_EQ(state.param_groups[1].options["lr"].toDouble(), 0.25);
    EXPECT_EQ(state.state["layers.0.bias"]["step"].toInt(), 1);

    torch::optim::AdamW other({group({q[5], q[1], q[3]}, 1), group({q[4], q[2], q[0]}, 1)}, AdamWOptions(1e-3));
    load_optimizer_state_dict(*twins.sharded, other, state);
    EXPECT_EQ(other.param_groups()[0].options().get_lr(), 0.25);
    EXPECT_EQ(other.param_groups()[1].options().get_lr(), 0.5);
    const auto loaded = optimizer_state_dict(*twins.sharded, other);
    for (const auto& item : state.state) {
      const auto& moment = item.value()["exp_avg"].toTensor();
      EXPECT_LE(difference(whole(moment), loaded.state[item.key()]["exp_avg"].toTensor()), 0) << item.key();
    }

    torch::optim::AdamW cut({group({q[0], q[1]}, 1), group({q[2], q[3], q[4], q[5]}, 1)}, AdamWOptions(1e-3));
    EXPECT_CONTAINS(error_of<c10::ValueError>([&] { load_optimizer_state_dict(*twins.sharded, cut, state); }),
                    "groups are cut differently");
    EXPECT_TRUE(cut.state().empty());
  });
}

TEST(OptimizerState, RefusesBeforeAnythingChanges) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    torch::optim::Adam optimizer(twins.q, torch::optim::AdamOptions(1e-2));
    train_step(*twins.sharded, optimizer, twins.part);
    const auto full = full_optimizer_state_dict(*twins.sharded, optimizer);
    const auto moment =
        whole(optimizer_state_dict(*twins.sharded, optimizer).state["layers.0.weight"]["exp_avg"].toTensor());
    const auto refusal = [&](const std::function<void(OptimizerStateDict&)>& damage) {
      auto state = full;
      if (rank.rank() == 0) {
        for (auto& item : state.state) {
          item.value()["exp_avg"] = item.value()["exp_avg"].toTensor() + 1;
        }
        damage(state);
      }
      const auto message = error_of<c10::ValueError>(
          [&] { load_optimizer_state_dict(*twins.sharded, optimizer, state, {.broadcast_from_rank0 = true}); });
      const auto now = optimizer_state_dict(*twins.sharded, optimizer).state["layers.0.weight"]["exp_avg"].toTensor();
      EXPECT_LE(difference(moment, now), 0);
      return message;
    };
    EXPECT_CONTAINS(refusal([](auto& s) { s.state.erase("layers.2.bias"); }), "missing: layers.2.bias");
    EXPECT_CONTAINS(refusal([](auto& s) { s.state.insert("extra", OptimizerStateDict::Values()); }),
                    "unexpected: extra");
    EXPECT_CONTAINS(refusal([](auto& s) { s.state["layers.0.bias"].erase("step"); }),
                    "state of layers.0.bias: 'step' is missing");
    EXPECT_CONTAINS(refusal([](auto& s) { s.state["layers.0.bias"]["step"] = 1.5; }), "'step' is given as Double");
    EXPECT_CONTAINS(refusal([](auto& s) { s.state["layers.0.bias"].insert("sum", torch::ones({13})); }),
                    "'sum' is none of");
    EXPECT_CONTAINS(refusal([](auto& s) { s.state["layers.0.bias"]["exp_avg"] = torch::ones({5}); }),
                    "'exp_avg' of layers.0.bias is given as [5]");
    EXPECT_CONTAINS(refusal([](auto& s) { s.param_groups[0].options.erase("betas"); }), "'betas' is missing");
    EXPECT_CONTAINS(refusal([](auto& s) { s.param_groups[0].params.pop_back(); }),
                    "in no parameter group: layers.4.bias");
  });
}

TEST(OptimizerState, NotStrictLoadsWhatIsThere) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    torch::optim::Adam saved(twins.q, torch::optim::AdamOptions(1e-2)), other(twins.q, torch::optim::AdamOptions(1));
    train_step(*twins.sharded, saved, twins.part);
    auto state = optimizer_state_dict(*twins.sharded, saved);
    state.state.erase("layers.2.bias");
    state.state.insert("extra", OptimizerStateDict::Values());
    load_optimizer_state_dict(*twins.sharded, other, state, {.strict = false});
    EXPECT_EQ(other.state().size(), 5u);
    EXPECT_EQ(other.param_groups()[0].options().get_lr(), 1e-2);
  });
}

// A parameter that never had a gradient has an entry without values, and loading takes its state away.
TEST(OptimizerState, OfAnUnusedParameter) {
  run_on_ranks(2, [](const RankContext& rank) {
    struct Net : torch::nn::Module {
      at::Tensor used = register_parameter("used", torch::ones({4}));
      at::Tensor unused = register_parameter("unused", torch::ones({4}));
    } net;
    fully_shard(net, {.mesh = rank.mesh});
    torch::optim::Adam optimizer(net.parameters()), other(net.parameters());
    net.used.sum().backward();
    optimizer.step();
    const auto state = optimizer_state_dict(net, optimizer);
    EXPECT_TRUE(state.state["unused"].is_empty());
    EXPECT_FALSE(state.state["used"].is_empty());
    net.unused.sum().backward();
    other.step();
    EXPECT_EQ(other.state().size(), 2u);
    load_optimizer_state_dict(net, other, state);
    EXPECT_EQ(other.state().size(), 1u);
  });
}

TEST(OptimizerState, OfTiedParametersHasTheFirstName) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Gpt>(1, /*tied=*/true));
    torch::optim::Adam optimizer(twins.q, torch::optim::AdamOptions(1e-2)),
        other(twins.q, torch::optim::AdamOptions(1));
    train_step(*twins.sharded, optimizer, twins.part);
    auto state = optimizer_state_dict(*twins.sharded, optimizer);
    EXPECT_TRUE(state.state.contains("token.weight"));
    EXPECT_FALSE(state.state.contains("head.weight"));
    // The other name is understood too.
    state.state.insert("head.weight", OptimizerStateDict::Values(state.state["token.weight"]));
    state.state.erase("token.weight");
    for (auto& name : state.param_groups[0].params) {
      name = name == "token.weight" ? "head.weight" : name;
    }
    load_optimizer_state_dict(*twins.sharded, other, state);
    EXPECT_EQ(other.state().size(), optimizer.state().size());
  });
}

TEST(OptimizerState, OfWhatHasNoNames) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>());
    torch::optim::LBFGS lbfgs(twins.q);
    EXPECT_CONTAINS(error_of<c10::NotImplementedError>([&] { (void)optimizer_state_dict(*twins.sharded, lbfgs); }),
                    "LBFGS is one history over all parameters");
    torch::optim::SGD elsewhere({torch::ones({2, 3})}, torch::optim::SGDOptions(0.1));
    EXPECT_CONTAINS(error_of<c10::ValueError>([&] { (void)optimizer_state_dict(*twins.sharded, elsewhere); }),
                    "no parameter of the module");
    const ScratchDirectory scratch;
    torch::optim::Adam adam(twins.q);
    train_step(*twins.sharded, adam, twins.part);
    EXPECT_CONTAINS(error_of([&] { torch::save(adam, scratch.file("adam.pt")); }), "fsdp::full_optimizer_state_dict");
  });
}

}  // namespace
}  // namespace fsdp::testing
