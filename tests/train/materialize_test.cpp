// Modules built on the meta device: sharded without memory, then given values that no number of ranks changes.
#include "support/parity.h"
#include "support/scratch_directory.h"
#include "support/spawn_ranks.h"

namespace fsdp::testing {
namespace {

template <class Net, class... Args>
std::shared_ptr<Net> built_on_meta(Args... args) {
  const MetaDeviceGuard meta;
  return std::make_shared<Net>(args...);
}

// Values from a private generator, as ranks that are threads need it.
void fill_all(torch::nn::Module& net) {
  const torch::NoGradGuard no_grad;
  auto generator = seeded(3);
  for (auto& parameter : net.parameters()) {
    parameter.uniform_(-1, 1, generator);
  }
}

TEST(MetaDevice, TakesWhatNamesNoDevice) {
  torch::manual_seed(4);
  const auto expected = torch::rand({3});
  torch::manual_seed(4);
  {
    const MetaDeviceGuard meta;
    EXPECT_TRUE(torch::empty({2, 3}).is_meta());
    EXPECT_TRUE(torch::randn({2}).is_meta());
    EXPECT_TRUE(torch::arange(4).is_meta());
    EXPECT_TRUE(torch::empty({2}, torch::kHalf).is_meta());
    EXPECT_TRUE(torch::empty({2}, torch::kCPU).is_cpu());
    EXPECT_TRUE(torch::zeros_like(expected).is_cpu()) << "the device of its argument";
    EXPECT_TRUE(torch::equal(expected + 1, 1 + expected));
    const torch::nn::Linear linear(3, 5);
    EXPECT_TRUE(linear->weight.is_meta() && linear->weight.requires_grad() && linear->weight.is_leaf());
  }
  EXPECT_TRUE(torch::empty({2}).is_cpu());
  EXPECT_TRUE(torch::equal(expected, torch::rand({3}))) << "no random number was drawn";
}

TEST(MetaInit, ShardsTakeNoMemory) {
  on_two_and_three([](const RankContext& rank) {
    const auto net = built_on_meta<Mlp>();
    shard_units(*net, rank.mesh);
    EXPECT_EQ(memory_stats(*net).parameters.current, 0);
    for (const auto& parameter : net->parameters()) {
      EXPECT_TRUE(DTensor::is(parameter) && parameter.is_meta());
      EXPECT_TRUE(DTensor(parameter).to_local().is_meta());
    }
    EXPECT_CONTAINS(describe(*net), "FSDPMlp");
    materialize(net, torch::kCPU, fill_all);
    EXPECT_GT(memory_stats(*net).parameters.current, 0);
    EXPECT_EQ(memory_stats(*net).parameters.peak, memory_stats(*net).parameters.current);
  });
}

TEST(MetaInit, TrainsAsAPlainNetWithTheSameInit) {
  for (int size : {1, 2, 3, 4}) {
    run_on_ranks(size, [](const RankContext& rank) {
      Twins twins(rank, net_of<Mlp>(), {.shard = false});
      const auto net = built_on_meta<Mlp>();
      shard_units(*net, rank.mesh);
      const auto handles = net->parameters();
      materialize(net, torch::kCPU, fill_all);
      fill_all(*twins.plain);
      twins.sharded = net;
      twins.q = net->parameters();
      for (size_t i = 0; i < handles.size(); ++i) {
        EXPECT_TRUE(handles[i].is_same(twins.q[i]) && handles[i].is_cpu() && handles[i].requires_grad());
      }
      EXPECT_SAME_PARAMETERS(twins, 0);
      expect_same_training(twins, {.num_steps = 3, .optimizer = all_optimizers()[5].make});
    });
  }
}

TEST(MetaInit, TiesStayTies) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Gpt>(1, /*tied=*/true), {.shard = false});
    const auto net = built_on_meta<Gpt>(1, true);
    shard_units(*net, rank.mesh);
    materialize(net, torch::kCPU,
                [&](torch::nn::Module& module) { load_state_dict(module, state_dict(*twins.plain)); });
    EXPECT_TRUE(net->token->weight.is_same(net->head->weight));
    twins.sharded = net;
    twins.q.clear();
    for (const auto& item : net->named_parameters()) {
      if (item.key() != "head.weight") {
        twins.q.push_back(item.value());
      }
    }
    EXPECT_SAME_PARAMETERS(twins, 0);
    expect_same_training(twins, {.num_steps = 2});
  });
}

TEST(MetaInit, OnTwoMeshDims) {  // behaviours 96
  run_on_ranks(4, [](const RankContext& rank) {
    const auto net = built_on_meta<Mlp>();
    shard_units(*net, mesh_2d(rank, 2, 2, "grid"));
    materialize(net, torch::kCPU, fill_all);
    Mlp plain;
    fill_all(plain);
    EXPECT_LE(own_difference(plain.parameters(), net->parameters()), 0);
  });
}

TEST(MetaInit, LoadsFromRankZeroAlone) {
  on_two_and_three([](const RankContext& rank) {
    const auto source = net_of<ConvNet>()();
    source->forward(source->batch(4, seeded(1)));  // moves the running statistics
    const auto net = built_on_meta<ConvNet>();
    shard_units(*net, rank.mesh);
    materialize(net, torch::kCPU, [&](torch::nn::Module& module) {
      load_state_dict(module, rank.rank() == 0 ? state_dict(*source) : StateDict(), {.broadcast_from_rank0 = true});
    });
    EXPECT_LE(difference(source->parameters(), net->parameters()), 0);
    EXPECT_LE(difference(source->buffers(), net->buffers()), 0);
    net->eval();
    source->eval();
    const auto x = source->batch(2, seeded(2));
    EXPECT_LE(difference(source->forward(x), net->forward(x).detach()), kClose);
  });
}

// The initialisers of torch::nn draw from the process-wide generator, so these ranks are processes.
template <class Net>
void expect_reset_as_in_one_process(const RankContext& rank) {
  const auto plain = std::make_shared<Net>();
  const auto net = built_on_meta<Net>();
  shard_units(*net, rank.mesh);
  torch::manual_seed(7);
  reset_parameters(*plain);
  const auto next = torch::rand({3});
  torch::manual_seed(7);
  materialize(net, torch::kCPU, reset_parameters);
  EXPECT_TRUE(torch::equal(next, torch::rand({3}))) << "the generator is where one process leaves it";
  const auto expected = plain->named_parameters();
  for (const auto& item : net->named_parameters()) {
    EXPECT_LE(difference(expected[item.key()], item.value()), 0) << item.key();
  }
  EXPECT_LE(difference(plain->buffers(), net->buffers()), 0);
}

RANKS_BODY(meta_init_by_reset_parameters) {
  init_process_group();
  const auto rank = default_rank_context();
  expect_reset_as_in_one_process<Mlp>(rank);
  expect_reset_as_in_one_process<Gpt>(rank);
  expect_reset_as_in_one_process<ConvNet>(rank);
  expect_reset_as_in_one_process<Lstm>(rank);
}

TEST(MetaInit, ResetParametersGivesTheValuesOfOneProcess) {
  for (int size : {1, 2, 3, 4}) {
    EXPECT_ALL_RANKS_OK(spawn_ranks(size, "meta_init_by_reset_parameters"));
  }
}

TEST(MetaInit, ReadingBeforehandNamesWhatHasNoValues) {  // behaviours 97
  for (int size : {1, 2, 3}) {
    run_on_ranks(size, [](const RankContext& rank) {
      const auto net = built_on_meta<Mlp>();
      shard_units(*net, rank.mesh);
      const auto x = net->batch(2, seeded(1));
      const auto message = error_of([&] { net->forward(x); });
      for (const auto* name : {"layers.0.weight", "layers.2.bias", "layers.4.weight", "fsdp::materialize"}) {
        EXPECT_CONTAINS(message, name);
      }
      const auto weight = net->parameters()[0];
      EXPECT_CONTAINS(error_of([&] { (void)DTensor(weight).full_tensor(); }), "layers.0.weight");
      EXPECT_CONTAINS(error_of([&] { (void)full_state_dict(*net); }), "layers.4.bias");
      EXPECT_CONTAINS(error_of([&] { load_state_dict(*net, state_dict(Mlp())); }), "layers.4.bias");
      materialize(net, torch::kCPU, fill_all);
      Mlp plain;
      fill_all(plain);
      EXPECT_LE(difference(plain.forward(x), net->forward(x).detach()), kClose);
    });
  }
}

struct Rotary : torch::nn::Module {
  Rotary() {
    weight = register_parameter("weight", torch::ones({5, 2}));
    frequencies = register_buffer("frequencies", values());
    positions = register_buffer("positions", torch::arange(3));
  }
  static at::Tensor values() { return torch::pow(10000, -torch::arange(0, 8, 2).to(torch::kFloat) / 8); }
  at::Tensor weight, frequencies, positions;
};

TEST(MetaInit, BuffersAreRebuiltOrComeFromRankZero) {  // R20
  for (const bool everywhere : {false, true}) {
    on_two_and_three([&](const RankContext& rank) {
      const auto net = built_on_meta<Rotary>();
      EXPECT_TRUE(net->frequencies.is_meta() && net->positions.is_meta());
      fully_shard(net, {.mesh = rank.mesh});
      materialize(net, torch::kCPU, [&](torch::nn::Module&) {
        const torch::NoGradGuard no_grad;
        net->weight.fill_(2);
        if (everywhere || rank.rank() == 0) {
          net->frequencies.copy_(Rotary::values());
          net->positions.copy_(torch::arange(3));
        }
      });
      EXPECT_LE(difference(torch::tensor({1.0F, 0.1F, 0.01F, 0.001F}), net->frequencies), 1e-6);
      EXPECT_TRUE(torch::equal(net->positions, torch::arange(3)));
      EXPECT_TRUE(net->frequencies.is_same(net->named_buffers()["frequencies"])) << "member and registry are one";
    });
  }
}

TEST(MetaInit, BuffersOfAFileAndUnderMixedPrecision) {  // R20
  on_two_and_three([](const RankContext& rank) {
    const auto net = built_on_meta<Rotary>();
    fully_shard(net, {.mesh = rank.mesh, .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    Rotary source;
    source.frequencies.fill_(0.5);
    materialize(net, torch::kCPU, [&](torch::nn::Module& module) { load_state_dict(module, state_dict(source)); });
    EXPECT_LE(difference(torch::full({4}, 0.5), net->frequencies), 0) << "what the file says";
    EXPECT_EQ(net->frequencies.scalar_type(), at::kFloat);
    EXPECT_EQ(torch::linear(torch::ones({1, 2}), net->weight).scalar_type(), at::kBFloat16);
  });
}

std::string refusal_of_init(const RankContext& rank, const std::function<void(Rotary&)>& init) {
  const auto net = built_on_meta<Rotary>();
  fully_shard(net, {.mesh = rank.mesh});
  const torch::NoGradGuard no_grad;
  return error_of<std::exception>([&] { materialize(net, torch::kCPU, [&](torch::nn::Module&) { init(*net); }); });
}

TEST(MetaInit, WhatInitForgetsIsAnErrorThatNamesIt) {
  for (int size : {1, 2, 3}) {
    run_on_ranks(size, [](const RankContext& rank) {
      const auto complete = [](Rotary& net) {
        net.weight.fill_(1);
        net.frequencies.fill_(1);
        net.positions.fill_(1);
      };
      EXPECT_EQ(refusal_of_init(rank, complete), "");
      const auto nothing = refusal_of_init(rank, [](Rotary&) {});
      EXPECT_CONTAINS(nothing, "weight, frequencies, positions");
      EXPECT_CONTAINS(refusal_of_init(rank, [](Rotary& net) { net.weight.fill_(1), net.frequencies.fill_(1); }),
                      "in part: positions");
      // The last row lies on the last rank only; the first rank cannot see that it is missing.
      EXPECT_CONTAINS(refusal_of_init(rank,
                                      [&](Rotary& net) {
                                        complete(net);
                                        net.weight.fill_(std::numeric_limits<float>::quiet_NaN());
                                        net.weight.narrow(0, 0, 4).fill_(1);
                                      }),
                      "in part: weight");
      EXPECT_CONTAINS(refusal_of_init(rank, [](Rotary& net) { net.weight.fill_(1), net.frequencies[0] = 1; }),
                      "frequencies, positions");
      const auto thrown = refusal_of_init(rank, [&](Rotary&) {
        if (rank.rank() == rank.size() - 1) {
          throw std::runtime_error("no such file");
        }
      });
      EXPECT_CONTAINS(thrown, "no such file");
    });
  }
}

TEST(MetaInit, WhatInitThrowsNeedBeNoStdException) {
  run_on_ranks(2, [](const RankContext& rank) {
    const auto net = built_on_meta<Rotary>();
    fully_shard(net, {.mesh = rank.mesh});
    const auto init = [&](torch::nn::Module&) {
      if (rank.rank() == 1) throw 7;
    };
    if (rank.rank() == 1) {
      EXPECT_THROW(materialize(net, torch::kCPU, init), int);
    } else {
      EXPECT_CONTAINS(error_of([&] { materialize(net, torch::kCPU, init); }),
                      "init failed: rank 1: an exception that is no std::exception");
    }
  });
}

// Experts on ranks {0, 1} and {2, 3}, the rest over all four.
TEST(MetaInit, PartsOnOtherMeshes) {
  run_on_ranks(4, [](const RankContext& rank) {
    torch::nn::Sequential net{nullptr};
    {
      const MetaDeviceGuard meta;
      net = torch::nn::Sequential(torch::nn::BatchNorm1d(6), torch::nn::Linear(6, 4));
    }
    fully_shard(net->ptr(1), {.mesh = mesh_2d(rank, 2, 2, "experts", {"pipeline", "expert"})["expert"]});
    fully_shard(net, {.mesh = rank.mesh});
    materialize(net, torch::kCPU, [&](torch::nn::Module& module) {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : module.parameters()) parameter.fill_(3);
      if (rank.rank() == 0)
        for (auto& buffer : module.buffers()) buffer.fill_(2);
    });
    for (const auto& parameter : net->parameters()) EXPECT_TRUE(DTensor(parameter).to_local().eq(3).all().item<bool>());
    for (const auto& buffer : net->buffers()) EXPECT_TRUE(buffer.eq(2).all().item<bool>()) << "those of rank 0";
  });
}

TEST(MetaInit, APlainModuleWithoutSharding) {
  const auto net = built_on_meta<Mlp>();
  materialize(net, torch::kCPU, fill_all);
  Mlp plain;
  fill_all(plain);
  EXPECT_LE(difference(plain.parameters(), net->parameters()), 0);
  net->loss(net->batch(2, seeded(1))).backward();
  EXPECT_TRUE(net->parameters()[0].grad().defined());
  EXPECT_THROW(materialize(net, torch::kMeta, fill_all), c10::ValueError);
}

TEST(MetaInit, TorchLoadGivesValuesToo) {
  const ScratchDirectory scratch;
  const auto source = net_of<Mlp>()();
  torch::save(source, scratch.file("plain.pt"));
  on_two_and_three([&](const RankContext& rank) {
    auto net = built_on_meta<Mlp>();
    shard_units(*net, rank.mesh);
    torch::load(net, scratch.file("plain.pt"));
    EXPECT_LE(difference(source->parameters(), net->parameters()), 0);

    // What has values keeps them.
    auto partly = built_on_meta<Mlp>();
    fully_shard(partly, {.mesh = rank.mesh});
    partly->parameters()[1].set_data(source->parameters()[1].detach().clone());
    EXPECT_CONTAINS(error_of([&] { partly->forward(partly->batch(2, seeded(1))); }),
                    "layers.0.weight, layers.2.weight");
    materialize(partly, torch::kCPU, [&](torch::nn::Module&) {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < partly->parameters().size(); ++i) {
        if (i != 1) {
          partly->parameters()[i].copy_(source->parameters()[i]);
        }
      }
    });
    EXPECT_LE(difference(source->parameters(), partly->parameters()), 0);
  });
}

TEST(MetaInit, PartsOfAGroup) {
  run_on_ranks(2, [](const RankContext& rank) {
    const auto net = built_on_meta<Mlp>();
    fully_shard(net, {.mesh = rank.mesh});
    EXPECT_CONTAINS(error_of<c10::ValueError>([&] { materialize(net->layers->ptr(0), torch::kCPU, fill_all); }),
                    "outside of this module");
    EXPECT_TRUE(net->parameters()[0].is_meta()) << "nothing was changed";

    Mlp mixed;
    {
      const MetaDeviceGuard meta;
      mixed.register_module("head", torch::nn::Linear(2, 2));
    }
    const auto message = error_of<c10::ValueError>([&] { fully_shard(mixed, {.mesh = rank.mesh}); });
    EXPECT_CONTAINS(message, "head.weight");
    EXPECT_FALSE(is_fsdp(mixed));
  });
}

TEST(Materialize, CheckpointedModulesAreReset) {
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::Sequential net{nullptr};
    {
      const MetaDeviceGuard meta;
      net = torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::Tanh(), torch::nn::Linear(4, 4));
    }
    apply_activation_checkpointing(net, [](const torch::nn::Module& part) { return part.as<torch::nn::Linear>(); });
    fully_shard(net, {.mesh = rank.mesh});
    materialize(*net, torch::kCPU, reset_parameters);
    EXPECT_TRUE(whole(net->parameters()[0]).isfinite().all().item<bool>());
    EXPECT_GT(whole(net->parameters()[2]).abs().sum().item<float>(), 0);
  });
}

TEST(MetaInit, AFailureLeavesItOnMeta) {
  run_on_ranks(2, [](const RankContext& rank) {
    const auto net = built_on_meta<torch::nn::LinearImpl>(4, 4);
    fully_shard(*net, {.mesh = rank.mesh});
    const auto half = [](torch::nn::Module& module) {
      const torch::NoGradGuard no_grad;
      module.as<torch::nn::LinearImpl>()->weight.fill_(1);
    };
    for (int i = 0; i < 2; ++i)
      EXPECT_CONTAINS(error_of<c10::ValueError>([&] { materialize(*net, torch::kCPU, half); }), "bias");
    EXPECT_CONTAINS(error_of([&] { (void)net->forward(torch::ones({2, 4})); }), "still on the meta device");
    materialize(*net, torch::kCPU, reset_parameters);
    EXPECT_TRUE(net->forward(torch::ones({2, 4})).isfinite().all().item<bool>());
  });
}

}  // namespace
}  // namespace fsdp::testing
