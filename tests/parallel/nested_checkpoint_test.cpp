// A checkpoint inside a checkpoint, across groups (behaviours 56).
#include <c10/util/StringUtil.h>
#include <fsdp/activation_checkpoint.h>

#include "support/parity.h"
#include "support/ranges.h"

namespace fsdp::testing {
namespace {

struct FeedForward : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return w2(torch::gelu(w1(x))); }
  torch::nn::Linear w1 = register_module("w1", torch::nn::Linear(12, 24));
  torch::nn::Linear w2 = register_module("w2", torch::nn::Linear(24, 12));
};

struct NestedLayer : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {  // [B, T, 12]
    const auto t = norm(x);
    const auto h = x + mix(at::scaled_dot_product_attention(t, t, t, {}, 0.0, /*is_causal=*/true));
    return h + (with_checkpoint ? checkpoint(feed, h) : feed->forward(h));
  }
  torch::nn::LayerNorm norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({12})));
  torch::nn::Linear mix = register_module("mix", torch::nn::Linear(12, 12));
  std::shared_ptr<FeedForward> feed = register_module("feed", std::make_shared<FeedForward>());
  bool with_checkpoint = false;
};

// Three layers, each in a checkpoint, with a checkpoint around the feed-forward inside.
class NestedTransformer : public TestNet {
 public:
  NestedTransformer() {
    for (int i = 0; i < 3; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), std::make_shared<NestedLayer>()));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({12})));
    output = register_module("output", torch::nn::Linear(12, 11));
  }
  at::Tensor forward(const at::Tensor& tokens) override {
    auto h = token(tokens) + position(torch::arange(tokens.size(1)));
    for (const auto& layer : layers) h = layer->with_checkpoint ? checkpoint(layer, h) : layer->forward(h);
    return output(norm(h));
  }
  std::vector<torch::nn::Module*> units() override { return {this}; }
  at::Tensor batch(int64_t batch_size, at::Generator generator) const override {
    return torch::randint(11, {batch_size, 6}, generator, torch::kLong);
  }
  torch::nn::Embedding token = register_module("token", torch::nn::Embedding(11, 12));
  torch::nn::Embedding position = register_module("position", torch::nn::Embedding(6, 12));
  std::vector<std::shared_ptr<NestedLayer>> layers;
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear output{nullptr};
};

// {root, [token, position], [norm, output], layers, their w1}, wrapped as the scenario asks.
struct NestedGroups {
  NestedGroups(NestedTransformer& net, const DeviceMesh& mesh) {
    const FullyShardOptions options{.mesh = mesh, .reshard_after_forward = true};
    ends.push_back(fully_shard({net.token.ptr(), net.position.ptr()}, options));
    for (auto& layer : net.layers) {
      layer->with_checkpoint = true;
      w1.push_back(fully_shard(layer->feed->w1, options));
      layers.push_back(fully_shard(layer, options));
    }
    ends.push_back(fully_shard({net.norm.ptr(), net.output.ptr()}, options));
    (void)fully_shard(net, options);
  }
  void list_backward_prefetch() {
    ends[1].set_modules_to_backward_prefetch({layers[2]});
    for (int i : {2, 1}) layers[i].set_modules_to_backward_prefetch({layers[i - 1], w1[i - 1]});
    layers[0].set_modules_to_backward_prefetch({ends[0]});
  }
  std::vector<FSDPModule> ends, layers, w1;
};

TEST(NestedCheckpoints, BackwardPrefetchByDefaultAndByLists) {  // behaviours 56
  const Ranges ranges;
  for (const bool with_lists : {false, true}) {
    on_two_and_three([&](const RankContext& rank) {
      Twins twins(rank, net_of<NestedTransformer>(), {.shard = false});
      NestedGroups groups(Twins::as<NestedTransformer>(*twins.sharded), rank.mesh);
      if (with_lists) groups.list_backward_prefetch();
      auto optimizer_p = sgd()(twins.p), optimizer_q = sgd()(twins.q);
      for (int step = 0; step < 3; ++step) {
        const auto loss = twins.sharded->loss(twins.part);
        Ranges::forget_this_thread();
        loss.backward();
        const auto gathered = Ranges::of_this_thread("FSDP::all_gather ");
        EXPECT_LE(gathered.size(), 8U) << "lists " << with_lists << ", step " << step << ": "
                                       << c10::Join(" ", gathered);
        twins.plain->loss(twins.joined).backward();
        EXPECT_SAME_GRADS(twins, kClose) << "lists " << with_lists << ", step " << step;
        EXPECT_EQ(twins.stats().gathered.current, 0);
        optimizer_p->step();
        optimizer_q->step();
        twins.zero_grad();
      }
    });
  }
}

}  // namespace
}  // namespace fsdp::testing
