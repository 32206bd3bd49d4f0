// A model whose sequence is split trains as one process on the whole batch and sequence.
#include <fsdp/context_parallel.h>
#include <fsdp/loss.h>

#include "attention/sequence_net.h"
#include "support/parity.h"
#include "support/spawn_ranks.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kRows = 2;  // of each data-parallel rank

struct Scheme {
  std::string name;
  ContextParallelOptions options;
};

std::vector<Scheme> schemes() {
  using Method = ContextParallelMethod;
  return {{"ulysses", {.method = Method::kUlysses}},
          {"ulysses, head-tail", {.method = Method::kUlysses, .split = SequenceSplit::kHeadTail}},
          {"ring", {.method = Method::kRing}},
          {"ring, all-to-all", {.method = Method::kRing, .rotation = RingRotation::kAllToAll}},
          {"ring, contiguous", {.method = Method::kRing, .split = SequenceSplit::kContiguous}}};
}

at::Tensor tokens_of(int64_t num_rows, int64_t length) {
  return torch::randint(0, SequenceNet::kVocab, {num_rows, length}, seeded(3), torch::kLong);
}

// Some labels do not count, unequally over ranks.
at::Tensor labels_of(const at::Tensor& tokens) {
  auto labels = next_token_labels(tokens);
  labels.narrow(1, 1, 3).fill_(-100);
  return labels;
}

struct Expected {
  double loss;
  std::vector<at::Tensor> grads;
};

Expected of_one_process(int64_t num_rows, int64_t length) {
  auto net = make_sequence_net();
  const auto tokens = tokens_of(num_rows, length);
  const auto labels = labels_of(tokens);
  const auto loss = loss_sum(net->forward(tokens, torch::arange(length)), labels) / num_valid(labels);
  loss.backward();
  return {loss.item<double>(), grads(net->parameters())};
}

// `mesh`: of all ranks, over which parameters are sharded or replicated as `options` say; the ranks of `cp` share a
// sequence.
void expect_as_one_process(const FullyShardOptions& options, const DeviceMesh& all, const DeviceMesh& cp,
                           int64_t data_rank, const Scheme& scheme, int64_t length, bool checkpoints = false,
                           double tolerance = kClose) {
  SCOPED_TRACE(scheme.name + ", length " + std::to_string(length));
  const auto num_rows = kRows * all.size() / cp.size();
  const auto expected = of_one_process(num_rows, length);
  auto net = make_sequence_net();
  net->checkpoints = checkpoints;
  fully_shard(net, options);
  auto tokens = tokens_of(num_rows, length).narrow(0, data_rank * kRows, kRows).contiguous();
  auto labels = labels_of(tokens);
  const auto scope = context_parallel(net, cp, {tokens, labels}, {1, 1}, scheme.options);
  const auto logits = net->forward(tokens, scope.position_ids());
  const auto sum = loss_sum(logits, labels);
  const auto num_tokens = num_valid(labels);
  fsdp::mean_over_ranks(sum, num_tokens, all).backward();
  EXPECT_NEAR(token_mean(sum, num_tokens, all), expected.loss, tolerance * 10);
  EXPECT_LE(difference(expected.grads, grads(net->parameters())), tolerance);
}

TEST(SequenceParity, OverOneToFourRanks) {
  for (const int size : {1, 2, 3, 4}) {
    run_on_ranks(size, [](const RankContext& rank) {
      for (const auto& scheme : schemes()) {
        const bool is_ulysses = scheme.options.method == ContextParallelMethod::kUlysses;
        if (is_ulysses && SequenceNet::kHeads % rank.size() != 0) continue;
        for (const int64_t length : {16, 13})
          expect_as_one_process({.mesh = rank.mesh}, rank.mesh, rank.mesh, 0, scheme, length);
      }
    });
  }
}

// Sharded over dp only, averaged over cp too.
TEST(SequenceParity, TwoByTwoReplicatedOverTheSequence) {
  run_on_ranks(4, [](const RankContext& rank) {
    const auto mesh = mesh_2d(rank, 2, 2, "grid", {"dp", "cp"});
    const FullyShardOptions options{.mesh = mesh, .dp_mesh_dims = {.shard = {"dp"}, .replicate = {"cp"}}};
    for (const auto& scheme : schemes())
      expect_as_one_process(options, rank.mesh, mesh["cp"], mesh.get_local_rank("dp"), scheme, 16);
  });
}

TEST(SequenceParity, CheckpointedAttentionTalksAgainInBackward) {
  run_on_ranks(4, [](const RankContext& rank) {
    const auto mesh = mesh_2d(rank, 2, 2, "grid", {"dp", "cp"});
    for (const auto& scheme : schemes())
      expect_as_one_process({.mesh = rank.mesh}, rank.mesh, mesh["cp"], mesh.get_local_rank("dp"), scheme, 16,
                            /*checkpoints=*/true);
  });
}

// behaviours 165: the program averages the gradients of a plain model over the ranks itself.
TEST(SequenceParity, PlainModelThatIsReducedByHand) {
  on_two_and_three([](const RankContext& rank) {
    const auto expected = of_one_process(kRows, 12);
    auto net = make_sequence_net();
    auto tokens = tokens_of(kRows, 12);
    auto labels = labels_of(tokens);
    const auto whole_logits = net->forward(tokens, torch::arange(12)).detach();
    ContextParallelOptions options{.method = ContextParallelMethod::kRing, .gradients_reduced_elsewhere = true};
    const auto scope = context_parallel(net, rank.mesh, {tokens, labels}, {1, 1}, options);
    const auto logits = net->forward(tokens, scope.position_ids());
    fsdp::mean_over_ranks(loss_sum(logits, labels), num_valid(labels), rank.mesh).backward();
    auto reduced = grads(net->parameters());
    for (auto& grad : reduced) {
      std::vector<at::Tensor> one{grad};
      rank.group->allreduce(one)->wait();
      grad.div_(rank.size());
    }
    EXPECT_LE(difference(expected.grads, reduced), kClose);
    EXPECT_LE(difference(whole_logits, scope.unshard(logits, 1)), kClose);
  });
}

TEST(SequenceParity, MixedPrecision) {
  run_on_ranks(2, [](const RankContext& rank) {
    const FullyShardOptions options{.mesh = rank.mesh,
                                    .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}};
    for (const auto& scheme : schemes())
      expect_as_one_process(options, rank.mesh, rank.mesh, 0, scheme, 16, false, /*tolerance=*/3e-2);
  });
}

// The meshes that programs have: made from the default group, dims flattened.
RANKS_BODY(sequence_on_named_meshes) {
  init_process_group();
  at::set_num_threads(1);
  const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "cp"});
  const auto all = mesh.flatten("world");
  const FullyShardOptions flat{.mesh = mesh, .dp_mesh_dims = {.shard = {"dp", "cp"}}};
  const FullyShardOptions replicated{.mesh = mesh, .dp_mesh_dims = {.shard = {"dp"}, .replicate = {"cp"}}};
  for (const auto& scheme : schemes()) {
    expect_as_one_process(flat, all, mesh["cp"], mesh.get_local_rank("dp"), scheme, 16);
    expect_as_one_process(replicated, all, mesh["cp"], mesh.get_local_rank("dp"), scheme, 13);
  }
  const auto three = init_device_mesh(torch::kCPU, {2, 1, 2}, {"dp_replicate", "dp_shard", "cp"});
  const FullyShardOptions hybrid{.mesh = three,
                                 .dp_mesh_dims = {.shard = {"dp_shard", "cp"}, .replicate = {"dp_replicate"}}};
  for (const auto& scheme : schemes())
    expect_as_one_process(hybrid, three.flatten("all"), three["cp"], three.get_local_rank("dp_replicate"), scheme, 16);

  torch::nn::Linear net(4, 4);
  const auto refusal = [&](const DataParallelMeshDims& dims, const DeviceMesh& given) {
    return error_of<c10::ValueError>([&] { fully_shard(net, {.mesh = given, .dp_mesh_dims = dims}); });
  };
  EXPECT_CONTAINS(refusal({.shard = {"tp"}}, mesh), "'tp', but the dims of the mesh are [dp, cp]");
  EXPECT_CONTAINS(refusal({.shard = {"dp"}, .replicate = {"dp"}}, mesh), "'dp' twice");
  EXPECT_CONTAINS(refusal({.shard = {"dp"}}, {}), "set FullyShardOptions::mesh");
  EXPECT_CONTAINS(refusal({.shard = {rank() == 3 ? "cp" : "dp"}}, mesh), "rank 3 has 'shard [cp], replicate []'");

  fully_shard(net, {.mesh = mesh, .dp_mesh_dims = {.replicate = {"dp", "cp"}}});  // what replicate() does
  EXPECT_EQ(DTensor(net->weight).placements(), Placements{Replicate{}});
  EXPECT_EQ(DTensor(net->weight).device_mesh().size(), 4);
  destroy_process_group();
}
TEST(SequenceParity, NamedMeshes) { EXPECT_ALL_RANKS_OK(spawn_ranks(4, "sequence_on_named_meshes")); }

// One valid token on rank 0, three on rank 1 (and the reverse of nothing at all).
TEST(SequenceLoss, IsTheMeanOverAllTokens) {
  run_on_ranks(2, [](const RankContext& rank) {
    const bool is_first = rank.rank() == 0;
    auto w = torch::ones({}, torch::requires_grad());
    const auto sum = w * (is_first ? 10.0 : 6.0);
    const auto num_tokens = is_first ? 1 : 3;
    fsdp::mean_over_ranks(sum, num_tokens, rank.mesh).backward();
    EXPECT_NEAR(mean_over_ranks(w.grad(), rank.group), 4.0, 1e-6);
    EXPECT_NEAR(token_mean(sum, num_tokens, rank.mesh), 4.0, 1e-6) << "in evaluation too: not 6, not 8";
    EXPECT_EQ(token_mean(sum * 0, 0, rank.mesh), 0.0) << "no token on any rank";
    EXPECT_NEAR(token_mean(is_first ? sum * 0 : sum, is_first ? 0 : 3, rank.mesh), 2.0, 1e-6);
  });
}

}  // namespace
}  // namespace fsdp::testing
