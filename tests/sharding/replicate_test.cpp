// replicate(): whole parameters, all-reduced gradients, on the groups of fully_shard.
#include <fsdp/call.h>
#include <fsdp/replicate.h>

#include "support/counting_backend.h"
#include "support/parity.h"

namespace fsdp::testing {
namespace {

void replicate_units(TestNet& net, const ReplicateOptions& options) {
  for (auto* unit : net.units()) replicate(*unit, options);
}

ProcessGroup counting_group_of(const RankContext& rank, const std::string& name) {
  const auto store = c10::make_intrusive<c10d::PrefixStore>(name, rank.store);
  return make_counting_group(store, rank.rank(), rank.size());
}

bool is_replicated(const at::Tensor& parameter) { return DTensor(parameter).placements() == Placements{Replicate{}}; }

TEST(Replicate, TrainsAsOneProcess) {  // behaviours 143
  for (const int size : {1, 2, 3}) {
    run_on_ranks(size, [](const RankContext& rank) {
      const auto group = counting_group_of(rank, "counted");
      Twins twins(rank, net_of<Gpt>(), {.shard = false});
      replicate_units(*twins.sharded, {.mesh = DeviceMesh::from_group(group, torch::kCPU)});
      for (const auto& parameter : twins.q) {
        EXPECT_TRUE(is_replicated(parameter));
        EXPECT_EQ(DTensor(parameter).to_local().sizes(), parameter.sizes());
      }
      twins.backward();
      EXPECT_SAME_GRADS(twins, kClose);
      const auto num_groups = static_cast<int>(twins.sharded->units().size());
      EXPECT_EQ(counts_of(group).num_collectives(), rank.size() == 1 ? 0 : num_groups);
      EXPECT_EQ(counts_of(group).num_all_reduces(), rank.size() == 1 ? 0 : num_groups);
      EXPECT_TRUE(is_replicated(twins.q.front().grad()));
      twins.zero_grad();
      expect_same_training(twins, {.num_steps = 10, .optimizer = [](std::vector<at::Tensor> parameters) {
                                     return std::make_unique<torch::optim::Adam>(std::move(parameters), 1e-2);
                                   }});
      EXPECT_EQ(counts_of(group).num_all_gathers(), 0);
      EXPECT_EQ(twins.stats().num_all_gathers, 0);
      EXPECT_EQ(twins.stats().gathered.peak, 0) << "no second copy of what every rank holds anyway";
    });
  }
}

TEST(Replicate, InsideFullyShard) {  // behaviours 144
  on_two_and_three([](const RankContext& rank) {
    Twins twins(rank, net_of<Gpt>(2), {.shard = false});
    auto& net = Twins::as<Gpt>(*twins.sharded);
    replicate(*net.blocks->ptr(0), {.mesh = rank.mesh});
    fully_shard(*net.blocks->ptr(1), {.mesh = rank.mesh});
    fully_shard(net, {.mesh = rank.mesh});
    for (const auto& item : net.named_parameters())
      EXPECT_EQ(is_replicated(item.value()), item.key().starts_with("blocks.0.")) << item.key();
    expect_same_training(twins, {.num_steps = 6, .before_update = [](const std::vector<at::Tensor>& parameters) {
                                   torch::nn::utils::clip_grad_norm_(parameters, 0.5);
                                 }});
  });
}

TEST(Replicate, ReducesInReduceDtype) {  // behaviours 145
  run_on_ranks(2, [](const RankContext& rank) {
    for (const auto reduce_dtype : {at::kFloat, at::kBFloat16}) {
      const auto group = counting_group_of(rank, c10::toString(reduce_dtype));
      Twins twins(rank, square_mlp(), {.shard = false});
      replicate_units(*twins.sharded, {.mesh = DeviceMesh::from_group(group, torch::kCPU),
                                       .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = reduce_dtype}});
      twins.backward();
      EXPECT_LE(twins.grad_difference(), 2e-2);
      EXPECT_EQ(twins.q.front().grad().scalar_type(), at::kFloat) << "the parameter's";
      const auto sent = counts_of(group).all_reduces();
      EXPECT_FALSE(sent.empty());
      for (const auto& all_reduce : sent) EXPECT_EQ(all_reduce.dtype, reduce_dtype);
    }
  });
}

TEST(Replicate, AccumulatesWithoutSync) {
  on_two_and_three([](const RankContext& rank) {
    const auto group = counting_group_of(rank, "counted");
    Twins twins(rank, net_of<Mlp>(), {.shard = false});
    replicate_units(*twins.sharded, {.mesh = DeviceMesh::from_group(group, torch::kCPU)});
    auto root = FSDPModule::of(*twins.sharded);
    root.set_requires_gradient_sync(false);
    twins.backward();
    EXPECT_EQ(counts_of(group).num_all_reduces(), 0);
    twins.next_batch();
    root.set_requires_gradient_sync(true);
    twins.backward();
    EXPECT_SAME_GRADS(twins, kClose);
  });
}

TEST(Replicate, StartsFromRank0WhenAsked) {
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::Linear net(3, 3);
    fill_parameters(*net, static_cast<uint64_t>(rank.rank()));
    replicate(net, {.mesh = rank.mesh, .sync_init = true});
    torch::nn::Linear first(3, 3);
    fill_parameters(*first, 0);
    EXPECT_EQ(difference(first->weight, net->weight), 0);
  });
}

TEST(Replicate, ListsAndIgnoredParameters) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, net_of<Mlp>(), {.shard = false});
    auto& layers = *Twins::as<Mlp>(*twins.sharded).layers;
    replicate({layers.ptr(0), layers.ptr(2)}, {.mesh = rank.mesh});
    replicate(*twins.sharded, {.mesh = rank.mesh, .ignored_params = {twins.q.back()}});
    EXPECT_FALSE(DTensor::is(twins.q.back()));
    EXPECT_TRUE(is_fsdp(*layers.ptr(2)));
    EXPECT_FALSE(is_fsdp(*layers.ptr(4)));
    EXPECT_CONTAINS(describe(*twins.sharded), "[Replicate]");
  });
}

// The shards are the gathered parameters: what is written through either is seen through both.
TEST(Replicate, SharesMemoryWithItsShards) {
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::Linear net(4, 3);
    fill_parameters(*net, 1);
    replicate(net, {.mesh = rank.mesh});
    const auto x = torch::ones({2, 4});
    const auto before = net->forward(x).detach();
    const torch::NoGradGuard no_grad;
    net->weight.mul_(2);
    net->bias.mul_(2);
    EXPECT_LE(difference(net->forward(x), before * 2), kClose);
    DTensor(net->weight).to_local().div_(4);
    DTensor(net->bias).to_local().div_(4);
    EXPECT_LE(difference(net->forward(x), before / 2), kClose);
    net->weight.view({-1}).zero_();  // through a view of the whole parameter
    EXPECT_EQ(DTensor(net->weight).to_local().abs().sum().item<float>(), 0);
    EXPECT_LE(difference(net->forward(x)[0], DTensor(net->bias).to_local()), kClose);
  });
}

// A lowered copy is a copy, and lives from forward to the end of backward.
TEST(Replicate, KeepsALoweredCopyWhileItIsUsed) {
  run_on_ranks(2, [](const RankContext& rank) {
    Twins twins(rank, square_mlp(), {.shard = false});
    replicate_units(*twins.sharded, {.mesh = rank.mesh, .mp_policy = {.param_dtype = at::kBFloat16}});
    twins.backward();
    EXPECT_GT(twins.stats().gathered.peak, 0);
    EXPECT_LT(twins.stats().gathered.peak, twins.stats().parameters.current);
    EXPECT_EQ(twins.stats().gathered.current, 0);
  });
}

TEST(Replicate, Misuse) {
  run_on_ranks(2, [](const RankContext& rank) {
    torch::nn::Linear net(3, 3);
    fill_parameters(*net, 1);
    const auto mesh = mesh_2d(rank, 2, 1, "two");
    EXPECT_CONTAINS(error_of<c10::ValueError>([&] { replicate(net, {.mesh = mesh}); }), "takes a 1-D mesh, got 2 dims");
    fully_shard(net, {.mesh = rank.mesh});
    EXPECT_CONTAINS(error_of([&] { replicate(net, {.mesh = rank.mesh}); }),
                    "replicate(Linear): this module was wrapped before");
    EXPECT_CONTAINS(error_of<c10::ValueError>(
                        [&] { replicate(std::vector<std::shared_ptr<torch::nn::Module>>{}, {.mesh = rank.mesh}); }),
                    "replicate({}): the list of modules is empty");
    torch::nn::Linear other(3 + rank.rank(), 3);
    EXPECT_CONTAINS(error_of<c10::ValueError>([&] { replicate(other, {.mesh = rank.mesh}); }),
                    "replicate(Linear): the ranks wrap different modules");
  });
}

}  // namespace
}  // namespace fsdp::testing
