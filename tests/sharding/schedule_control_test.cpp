// What FSDPModule and reshard_after_forward say about when parameters are gathered and freed.
#include "support/parity.h"

namespace fsdp::testing {
namespace {

// Eight square layers: enough for lists that look two ahead.
NetFactory eight_layers() {
  struct Net : TestNet {
    Net() {
      for (int i = 0; i < 8; ++i) layers->push_back(torch::nn::Linear(8, 8));
      register_module("layers", layers);
    }
    at::Tensor forward(const at::Tensor& x) override {
      auto h = x;
      for (const auto& layer : *layers) h = layer->as<torch::nn::Linear>()->forward(h).tanh();
      return h;
    }
    std::vector<torch::nn::Module*> units() override {
      std::vector<torch::nn::Module*> all;
      for (const auto& layer : *layers) all.push_back(layer.get());
      all.push_back(this);
      return all;
    }
    at::Tensor batch(int64_t batch_size, at::Generator generator) const override {
      return torch::randn({batch_size, 8}, generator);
    }
    torch::nn::ModuleList layers;
  };
  return net_of<Net>();
}

std::vector<FSDPModule> layers_of(TestNet& net) {
  std::vector<FSDPModule> layers;
  for (auto* unit : net.units())
    if (unit != &net) layers.push_back(FSDPModule::of(*unit));
  return layers;
}

std::vector<FSDPModule> slice(const std::vector<FSDPModule>& layers, int from, int step, int count) {
  std::vector<FSDPModule> part;
  for (int i = 1; i <= count; ++i) {
    const int place = from + i * step;
    if (place >= 0 && place < static_cast<int>(layers.size())) part.push_back(layers[place]);
  }
  return part;
}

TEST(Prefetch, ListsTwoAheadTrainAlike) {  // behaviours 14
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, eight_layers());
    auto layers = layers_of(*twins.sharded);
    for (int i = 0; i < 8; ++i) {
      layers[i].set_modules_to_forward_prefetch(slice(layers, i, +1, 2));
      layers[i].set_modules_to_backward_prefetch(slice(layers, i, -1, 2));
    }
    expect_same_training(twins, {.num_steps = 4});
    EXPECT_EQ(twins.stats().gathered.current, 0) << "nothing stays gathered";
    const int64_t layer = (8 * 8 + 8) * 4 + 128;                                                // aligned
    EXPECT_LE(twins.stats().gathered.peak, (2 + 2) * layer) << "two, and what the lists name";  // behaviours 130
  });
}

TEST(Prefetch, AListStartsItsGathersAfterTheOwnOne) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, eight_layers());
    auto layers = layers_of(*twins.sharded);
    layers[0].set_modules_to_forward_prefetch({layers[1], layers[2]});
    const auto first = [&] {
      const auto before = twins.stats().num_all_gathers;
      (void)twins.sharded->units()[0]->as<torch::nn::Linear>()->forward(twins.part);
      return twins.stats().num_all_gathers - before;
    };
    EXPECT_EQ(first(), 3);
    FSDPModule::of(*twins.sharded).reset_iter_state();
    layers[0].set_modules_to_forward_prefetch({});
    EXPECT_EQ(first(), 1) << "an empty list prefetches nothing";
  });
}

TEST(Prefetch, OfWhatIsThereAlready) {  // behaviours 59
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, eight_layers());
    auto layers = layers_of(*twins.sharded);
    layers[0].set_modules_to_backward_prefetch({layers[7]});
    layers[3].set_modules_to_forward_prefetch({layers[3], layers[2]});
    expect_same_training(twins, {.num_steps = 3});
    EXPECT_EQ(twins.stats().gathered.current, 0);
  });
}

TEST(Unshard, AsyncBeforeTheFirstForward) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, square_mlp());
    auto unit = FSDPModule::of(*Twins::as<Mlp>(*twins.sharded).layers->ptr(0));
    auto handle = unit.unshard(/*async_op=*/true);
    EXPECT_EQ(twins.stats().num_all_gathers, 1);
    EXPECT_EQ(twins.stats().gathered.current, 0) << "only started";
    handle.wait();
    handle.wait();
    EXPECT_GT(twins.stats().gathered.current, 0);
    expect_same_training(twins, {.num_steps = 2});
    (void)unit.unshard(/*async_op=*/true);  // nobody waits: the forward does
    expect_same_training(twins, {.num_steps = 2});
  });
}

TEST(Unshard, ModuleWithoutParameters) {  // behaviours 61
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::Sequential net(torch::nn::Linear(4, 4));
    fill_parameters(*net, 1);
    fully_shard(*net->ptr(0), {.mesh = rank.mesh});
    auto root = fully_shard(net, {.mesh = rank.mesh});
    root.unshard(true).wait();
    EXPECT_EQ(memory_stats(*net).num_all_gathers, 0);
  });
}

TEST(ReshardAfterForward, ToAFewNeighbours) {
  run_on_ranks(4, [](const RankContext& rank) {
    Twins twins(rank, eight_layers(), {.shard = false});
    for (auto* unit : twins.sharded->units()) fully_shard(*unit, {.mesh = rank.mesh, .reshard_after_forward = 2});
    const auto loss = twins.sharded->loss(twins.part);
    const auto parts = twins.stats().gathered.current;
    const int64_t layer = (8 * 8 + 8) * 4;
    EXPECT_GE(parts, 7 * layer / 2) << "layers that are behind keep half of themselves";
    EXPECT_LE(parts, 7 * (layer / 2 + 200) + 2 * (layer + 400));
    twins.plain->loss(twins.joined);
    EXPECT_SAME_PARAMETERS(twins, 0) << "read between forward and backward";
    loss.backward();
    twins.plain->loss(twins.joined).backward();
    EXPECT_SAME_GRADS(twins, kClose);
    EXPECT_EQ(twins.stats().gathered.current, 0) << "backward leaves no part behind";
    twins.zero_grad();
    expect_same_training(twins, {.num_steps = 3});
  });
}

TEST(ReshardAfterForward, WrongNumbers) {
  run_on_ranks(4, [](const RankContext& rank) {
    torch::nn::Linear net(4, 4);
    fill_parameters(*net, 1);
    for (const int number : {0, 3, -1, 8})
      EXPECT_CONTAINS(
          error_of<c10::ValueError>([&] { fully_shard(net, {.mesh = rank.mesh, .reshard_after_forward = number}); }),
          std::to_string(number))
          << number;
    EXPECT_FALSE(is_fsdp(*net)) << "nothing was wrapped";
    fully_shard(net, {.mesh = rank.mesh, .reshard_after_forward = 4});  // the whole group: the same as true
    EXPECT_TRUE(is_fsdp(*net));
  });
}

TEST(ReshardAfterForward, SetLater) {  // behaviours 20, 50
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, eight_layers());
    auto root = FSDPModule::of(*twins.sharded);
    const auto backward_gathers = [&] {
      twins.sharded->loss(twins.part).backward();
      twins.zero_grad();
      const auto loss = twins.sharded->loss(twins.part);
      const auto before = twins.stats().num_all_gathers;
      loss.backward();
      twins.zero_grad();
      return twins.stats().num_all_gathers - before;
    };
    EXPECT_LE(backward_gathers(), 8);
    root.set_reshard_after_forward(false);
    EXPECT_EQ(backward_gathers(), 0);
    root.set_reshard_after_forward(true, /*recurse=*/false);
    EXPECT_LE(backward_gathers(), 1);
    root.set_reshard_after_forward(true);
    EXPECT_LE(backward_gathers(), 9);
    expect_same_training(twins, {.num_steps = 2});
  });
}

TEST(ReshardAfterBackward, KeepsParametersForTheNextMicrobatch) {  // behaviours 31
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, eight_layers(), {.reshard_after_forward = false});
    auto root = FSDPModule::of(*twins.sharded);
    root.set_reshard_after_backward(false);
    root.set_is_last_backward(false);
    root.set_requires_gradient_sync(false);
    twins.backward();
    const auto gathers = twins.stats().num_all_gathers;
    EXPECT_EQ(gathers, 8);
    twins.backward();
    root.set_reshard_after_backward(true);
    root.set_is_last_backward(true);
    root.set_requires_gradient_sync(true);
    twins.backward();
    EXPECT_EQ(twins.stats().num_all_gathers, gathers) << "three microbatches, one gather each";
    EXPECT_SAME_GRADS(twins, kClose);
    EXPECT_EQ(twins.stats().gathered.current, 0);
  });
}

TEST(UnshardInBackward, FalseIsNotPrefetchedButStillRead) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, eight_layers());
    for (auto& layer : layers_of(*twins.sharded)) layer.set_unshard_in_backward(false);
    expect_same_training(twins, {.num_steps = 3});
  });
}

TEST(ResetIterState, AfterAnExceptionInForward) {
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, eight_layers());
    auto root = FSDPModule::of(*twins.sharded);
    expect_same_training(twins, {.num_steps = 2});
    root.set_requires_gradient_sync(false);
    twins.sharded->loss(twins.part).backward();
    const auto wrong = torch::ones({2, 5});
    EXPECT_NE(error_of<std::exception>([&] {
                auto h = twins.sharded->units()[0]->as<torch::nn::Linear>()->forward(twins.part);
                (void)twins.sharded->units()[1]->as<torch::nn::Linear>()->forward(wrong + h.sum());
              }),
              "");
    root.reset_iter_state();
    root.set_requires_gradient_sync(true);
    EXPECT_EQ(twins.stats().gathered.current, 0);
    EXPECT_EQ(twins.stats().buffers.current, 0);
    expect_same_training(twins, {.num_steps = 3});
    auto inner = layers_of(*twins.sharded)[0];
    EXPECT_CONTAINS(error_of([&] { inner.reset_iter_state(); }), "root");
  });
}

TEST(DeviceStreams, SettingsOfThemAreRefused) {
  run_on_ranks(1, [](const RankContext& rank) {
    torch::nn::Linear net(4, 4);
    auto module = fully_shard(net, {.mesh = rank.mesh});
    const auto refused = [&](const std::function<void()>& action) {
      EXPECT_CONTAINS(error_of<c10::NotImplementedError>(action), "device streams");
    };
    refused([&] { module.set_post_optim_event(); });
    refused([&] { module.set_separate_reduce_scatter_group(); });
    refused([&] { module.set_symm_mem_for_comm(); });
    refused([&] { module.set_allocate_memory_from_process_group_for_comm(true); });
    refused([&] { module.set_custom_all_gather(); });
    refused([&] { module.set_custom_reduce_scatter(); });
    refused([&] { share_comm_ctx({module}); });
  });
}

}  // namespace
}  // namespace fsdp::testing
