// What fully_shard accepts, what it refuses and why, and what a wrapped module says of itself.
#include "support/parity.h"

namespace fsdp::testing {
namespace {

TEST(Init, EveryParameterIsADTensorThatLooksWhole) {
  for (int size : {1, 2, 3, 4}) {
    run_on_ranks(size, [](const RankContext& rank) {
      Twins twins(rank, net_of<Mlp>(), {.shard = false});
      const auto handles = twins.sharded->parameters();
      shard_units(*twins.sharded, rank.mesh);
      const auto names = twins.sharded->named_parameters().keys();
      EXPECT_EQ(names, twins.plain->named_parameters().keys());
      for (size_t i = 0; i < handles.size(); ++i) {
        EXPECT_TRUE(handles[i].is_same(twins.sharded->parameters()[i])) << names[i];
        EXPECT_TRUE(DTensor::is(handles[i])) << names[i];
        EXPECT_TRUE(handles[i].is_leaf() && handles[i].requires_grad()) << names[i];
        EXPECT_EQ(handles[i].sizes(), twins.p[i].sizes()) << names[i];
        const DTensor tensor(handles[i]);
        EXPECT_EQ(tensor.placements(), (Placements{Shard{0}})) << names[i];
        EXPECT_EQ(tensor.device_mesh(), rank.mesh) << names[i];
      }
      auto& first = *Twins::as<Mlp>(*twins.sharded).layers->ptr(0)->as<torch::nn::LinearImpl>();
      EXPECT_TRUE(first.weight.is_same(handles[0])) << "member and registered parameter are one tensor";
      EXPECT_SAME_PARAMETERS(twins, 0);
    });
  }
}

TEST(Init, ParametersWithAnyNumberOfDims) {
  on_two_and_three([](const RankContext& rank) {
    struct Net : torch::nn::Module {
      Net() {
        for (const std::vector<int64_t>& sizes :
             {std::vector<int64_t>{1}, {7}, {5, 3}, {3, 2, 2}, {2, 1, 3, 1}, {4, 2, 1, 1, 2}}) {
          register_parameter("p" + std::to_string(parameters().size()), torch::empty(sizes));
        }
      }
    };
    Net plain, sharded;
    fill_parameters(plain, 1);
    fill_parameters(sharded, 1);
    fully_shard(sharded, {.mesh = rank.mesh});
    const auto p = plain.parameters(), q = sharded.parameters();
    EXPECT_LE(difference(p, q), 0);
    for (const auto& parameters : {p, q}) {
      at::Tensor loss = torch::zeros({});
      for (const auto& parameter : parameters) {
        loss = loss + parameter.square().sum();
      }
      loss.backward();
    }
    EXPECT_LE(difference(grads(p), grads(q)), kClose);
  });
}

TEST(Init, OneGroupHoldsSeveralDtypes) {  // behaviours 103: two trainable dtypes are accepted
  on_two_and_three([](const RankContext& rank) {
    struct Net : torch::nn::Module {
      at::Tensor a = register_parameter("a", torch::ones({5, 2}));
      at::Tensor b = register_parameter("b", torch::ones({3}, torch::kDouble) * 2);
      at::Tensor frozen = register_parameter("frozen", torch::ones({4}, torch::kBFloat16), /*requires_grad=*/false);
      at::Tensor loss() { return a.square().sum().to(torch::kDouble) * b.sum() + frozen.to(torch::kDouble).sum(); }
    };
    Net plain, sharded;
    fully_shard(sharded, {.mesh = rank.mesh});
    plain.loss().backward();
    sharded.loss().backward();
    EXPECT_EQ(sharded.b.grad().scalar_type(), torch::kDouble);
    EXPECT_LE(difference(grads(plain.parameters()), grads(sharded.parameters())), kClose);
    EXPECT_LE(difference(plain.parameters(), sharded.parameters()), 0);
  });
}

TEST(Init, ModuleListIsOneGroup) {  // behaviours 107: accepted
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Gpt>(), {.shard = false});
    fully_shard(*Twins::as<Gpt>(*twins.sharded).blocks, {.mesh = rank.mesh});
    fully_shard(*twins.sharded, {.mesh = rank.mesh});
    EXPECT_TRUE(is_fsdp(*Twins::as<Gpt>(*twins.sharded).blocks));
    const auto before = twins.stats().num_reduce_scatters;
    twins.backward();
    EXPECT_EQ(twins.stats().num_reduce_scatters, before + 2);
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

TEST(Init, ModuleWithoutParametersIsARoot) {  // behaviours 93
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>(), {.shard = false});
    auto& layers = *Twins::as<Mlp>(*twins.sharded).layers;
    fully_shard(*layers.ptr(1), {.mesh = rank.mesh});  // the ReLU
    shard_units(*twins.sharded, rank.mesh);
    twins.backward();
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

TEST(Init, HandleForms) {
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::Linear holder(4, 4);
    auto shared = std::make_shared<TanhLinear>();
    torch::nn::LinearImpl value(4, 4);
    fill_parameters(*holder, 1);
    fill_parameters(*shared, 1);
    fill_parameters(value, 1);
    EXPECT_FALSE(is_fsdp(*holder));
    EXPECT_THROW((void)FSDPModule::of(*holder), c10::ValueError);
    fully_shard(holder, {.mesh = rank.mesh});
    fully_shard(shared, {.mesh = rank.mesh});
    fully_shard(value, {.mesh = rank.mesh});
    EXPECT_TRUE(is_fsdp(*holder) && is_fsdp(*shared) && is_fsdp(value));
    EXPECT_FALSE(is_fsdp(*shared->linear));
    FSDPModule::of(*holder).unshard();
  });
}

template <class Error>
std::string refusal(const RankContext& rank, torch::nn::Module& module) {
  return error_of<Error>([&] { fully_shard(module, {.mesh = rank.mesh}); });
}

TEST(InitErrors, ZeroDimParameter) {  // behaviours 88
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::Module net;
    net.register_parameter("scale", torch::ones({}));
    const auto message = refusal<c10::ValueError>(rank, net);
    EXPECT_CONTAINS(message, "scale");
    EXPECT_CONTAINS(message, '1');  // advises one element in one dim
    EXPECT_FALSE(is_fsdp(net));
    EXPECT_FALSE(DTensor::is(net.parameters()[0]));
  });
}

TEST(InitErrors, NonContiguousParameter) {  // behaviours 89
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::Module net;
    net.register_parameter("kernel", torch::ones({4, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast));
    EXPECT_CONTAINS(refusal<c10::NotImplementedError>(rank, net), "kernel");
  });
}

TEST(InitErrors, SameModuleTwice) {  // behaviours 106
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::Linear net(4, 4);
    fill_parameters(*net, 1);
    fully_shard(net, {.mesh = rank.mesh});
    EXPECT_NE(refusal<c10::Error>(rank, *net), "");
    EXPECT_TRUE(is_fsdp(*net));
  });
}

TEST(InitErrors, OptionsThatDifferBetweenRanks) {
  run_on_ranks(2, [](const RankContext& rank) {
    const auto refused = [&](const FullyShardOptions& first, const FullyShardOptions& second) {
      torch::nn::Linear net(4, 4);
      fill_parameters(*net, 1);
      auto options = rank.rank() == 0 ? first : second;
      options.mesh = rank.mesh;
      return error_of<c10::ValueError>([&] { fully_shard(net, options); });
    };
    EXPECT_CONTAINS(refused({}, {.mp_policy = {.param_dtype = at::kBFloat16}}), "param_dtype");
    EXPECT_CONTAINS(refused({}, {.mp_policy = {.reduce_dtype = at::kBFloat16}}), "reduce_dtype");
    EXPECT_CONTAINS(refused({}, {.reshard_after_forward = false}), "reshard_after_forward");
    EXPECT_CONTAINS(refused({}, {.replicate_below = 5}), "bias");
    EXPECT_CONTAINS(refused({}, {.sync_init = true}), "sync_init");
  });
}

TEST(InitErrors, OptionsWithoutMeaning) {
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::Linear net(4, 4);
    fill_parameters(*net, 1);
    EXPECT_CONTAINS(error_of<c10::ValueError>([&] { fully_shard(net, {.mesh = rank.mesh, .replicate_below = -1}); }),
                    "replicate_below is -1");
    EXPECT_CONTAINS(
        error_of<c10::ValueError>([&] { fully_shard(net, {.mesh = rank.mesh, .ignored_params = {at::Tensor()}}); }),
        "undefined tensor");
    EXPECT_FALSE(is_fsdp(*net));
  });
}

TEST(InitErrors, ChildAfterItsParent) {
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
    fill_parameters(*net, 1);
    fully_shard(net, {.mesh = rank.mesh});
    const auto message = refusal<c10::ValueError>(rank, *net->ptr(0));
    EXPECT_CONTAINS(message, "Sequential, was wrapped before");
    EXPECT_CONTAINS(message, "bottom up");
  });
}

TEST(InitErrors, StatisticsOfAModuleThatWasNotWrapped) {
  torch::nn::Linear net(4, 4);
  EXPECT_CONTAINS(error_of<c10::ValueError>([&] { (void)memory_stats(*net); }), "was not wrapped by fully_shard");
}

TEST(InitErrors, MeshOfThreeDims) {
  run_on_ranks(1, [](const RankContext& rank) {
    const auto group = [&](int which) {
      return make_process_group(c10::make_intrusive<c10d::PrefixStore>("dim" + std::to_string(which), rank.store), 0,
                                1);
    };
    const auto mesh = DeviceMesh::from_group({group(0), group(1), group(2)}, torch::kCPU,
                                             torch::zeros({1, 1, 1}, torch::kLong), {"a", "b", "c"});
    torch::nn::Linear net(4, 4);
    const auto message = error_of<c10::ValueError>([&] { fully_shard(net, {.mesh = mesh}); });
    EXPECT_CONTAINS(message, '3');
    EXPECT_FALSE(DTensor::is(net->weight));
  });
}

TEST(InitErrors, MemberReplacedBeforeWrapping) {  // R12
  run_on_ranks(2, [](const RankContext& rank) {
    auto net = net_of<Mlp>()();
    auto& layers = *Twins::as<Mlp>(*net).layers;
    layers.ptr(2)->as<torch::nn::LinearImpl>()->weight = torch::ones({5, 13});
    EXPECT_CONTAINS(refusal<c10::ValueError>(rank, *net), "layers.2.weight");
  });
}

TEST(InitErrors, StructureDiffersBetweenRanks) {
  run_on_ranks(3, [](const RankContext& rank) {
    torch::nn::Module shapes, names, counts;
    shapes.register_parameter("weight", torch::ones({rank.rank() == 1 ? 5 : 4, 2}));
    names.register_parameter(rank.rank() == 2 ? "weights" : "weight", torch::ones({4}));
    counts.register_parameter("weight", torch::ones({4}));
    if (rank.rank() == 1) {
      counts.register_parameter("bias", torch::ones({4}));
    }
    EXPECT_CONTAINS(refusal<c10::Error>(rank, shapes), "weight");
    EXPECT_CONTAINS(refusal<c10::Error>(rank, names), "weight");
    EXPECT_CONTAINS(refusal<c10::Error>(rank, counts), "bias");
  });
}

TEST(Init, ValuesThatDifferAreAWarningAndEachRankKeepsItsRows) {
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::Linear net(3, 4);
    {
      const torch::NoGradGuard no_grad;
      net->weight.fill_(rank.rank());
      net->bias.fill_(rank.rank());
    }
    struct Collect : c10::WarningHandler {
      void process(const c10::Warning& warning) override { text += warning.msg(); }
      std::string text;
    } collect;
    {
      const c10::WarningUtils::WarningHandlerGuard guard(&collect);
      fully_shard(net, {.mesh = rank.mesh});
    }
    EXPECT_CONTAINS(collect.text, "sync_init");
    auto expected = torch::zeros({4, 3});
    expected.narrow(0, 2, 2).fill_(1);
    EXPECT_LE(difference(expected, net->weight), 0);
  });
}

TEST(Init, EqualStartsAreNotWarnedAbout) {
  run_on_ranks(2, [](const RankContext& rank) {
    struct Collect : c10::WarningHandler {
      void process(const c10::Warning& warning) override { text += warning.msg(); }
      std::string text;
    } collect;
    const c10::WarningUtils::WarningHandlerGuard guard(&collect);
    Twins twins(rank, net_of<Mlp>());
    EXPECT_EQ(collect.text, "");
  });
}

TEST(Init, SyncInitStartsFromRankZero) {
  on_two_and_three([](const RankContext& rank) {
    auto net = net_of<Mlp>()(), reference = net_of<Mlp>()();
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) {
        parameter.add_(rank.rank());
      }
    }
    for (auto* unit : net->units()) {
      fully_shard(*unit, {.mesh = rank.mesh, .sync_init = true});
    }
    EXPECT_LE(difference(reference->parameters(), net->parameters()), 0);
  });
}

TEST(Describe, ShowsTheTreeWithoutCommunication) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, net_of<Gpt>());
    const auto before = twins.stats();
    const auto text = rank.rank() == 0 ? describe(*twins.sharded) : "";  // one rank only
    EXPECT_EQ(twins.stats().num_all_gathers, before.num_all_gathers);
    EXPECT_EQ(twins.stats().num_meetings, before.num_meetings);
    if (rank.rank() != 0) {
      return;
    }
    EXPECT_CONTAINS(text, "FSDP");
    EXPECT_CONTAINS(text, "blocks");
    EXPECT_CONTAINS(text, "qkv");
    EXPECT_CONTAINS(text, "Shard(0)");
    EXPECT_CONTAINS(text, "11, 12");  // token.weight, global
    EXPECT_CONTAINS(text, "6, 12");   // and local
    EXPECT_EQ(describe(*twins.plain).find("FSDP"), std::string::npos);
  });
}

}  // namespace
}  // namespace fsdp::testing
