// A scope whose buffers belong to the module: who else reads or writes the buffers of a module must know.
#include <fsdp/context_parallel.h>
#include <fsdp/distributed_data_parallel.h>
#include <fsdp/loss.h>

#include "attention/sequence_net.h"
#include "support/parity.h"
#include "support/scratch_directory.h"

namespace fsdp::testing {
namespace {

// Multiplies the logits of each token by the row of a registered table that belongs to its position, as rotary tables
// are used.
struct TableNet : torch::nn::Module {
  explicit TableNet(int64_t length) {
    net = register_module("net", make_sequence_net());
    table = register_buffer("table", torch::empty({length, SequenceNet::kVocab}).normal_(0, 1, seeded(8)));
  }
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& positions) {
    return net->forward(tokens, positions) * table;
  }
  std::shared_ptr<SequenceNet> net;
  at::Tensor table;
};

at::Tensor table_net_tokens(int64_t length) {
  return torch::randint(0, SequenceNet::kVocab, {2, length}, seeded(4), torch::kLong);
}

constexpr int kTableSteps = 2;

std::shared_ptr<TableNet> table_net_of_one_process(int64_t length) {
  const auto net = std::make_shared<TableNet>(length);
  const auto optimizer = sgd()(net->parameters());
  const auto tokens = table_net_tokens(length);
  const auto labels = next_token_labels(tokens);
  for (int step = 0; step < kTableSteps; ++step) {
    (loss_sum(net->forward(tokens, torch::arange(length)), labels) / num_valid(labels)).backward();
    optimizer->step();
    optimizer->zero_grad();
  }
  return net;
}

ContextParallelOptions ring_reduced_by_ddp() {
  return {.method = ContextParallelMethod::kRing, .gradients_reduced_elsewhere = true};
}

void expect_ddp_keeps_the_parts(const RankContext& rank, int64_t length, bool wraps_inside) {
  SCOPED_TRACE(c10::str("length ", length, wraps_inside ? ", wrapped inside" : ""));
  const auto net = std::make_shared<TableNet>(length);
  const auto whole_table = net->table.clone();
  auto tokens = table_net_tokens(length);
  auto labels = next_token_labels(tokens);
  DistributedDataParallel<TableNet> ddp(nullptr);
  const auto wrap = [&] { ddp = DistributedDataParallel(net, {.mesh = rank.mesh}); };
  if (!wraps_inside) wrap();
  const auto optimizer = sgd()(net->parameters());
  for (int step = 0; step < kTableSteps; ++step) {
    const auto scope = context_parallel(net, rank.mesh, {tokens, labels, net->table}, {1, 1, 0}, ring_reduced_by_ddp());
    if (wraps_inside && step == 0) wrap();
    const auto sum = loss_sum(ddp->forward(tokens, scope.position_ids()), labels);
    fsdp::mean_over_ranks(sum, num_valid(labels), rank.mesh).backward();
    optimizer->step();
    optimizer->zero_grad();
  }
  EXPECT_LE(difference(table_net_of_one_process(length)->parameters(), net->parameters()), kClose);
  EXPECT_TRUE(net->table.equal(whole_table));
}

TEST(SequenceDdp, EachRankKeepsItsPartOfASplitBuffer) {
  on_two_and_three([](const RankContext& rank) {
    for (const int64_t length : {12, 13})
      for (const bool wraps_inside : {false, true}) expect_ddp_keeps_the_parts(rank, length, wraps_inside);
  });
}

// Ranks without data are in no scope: they cannot tell which buffers the others leave out.
TEST(SequenceDdp, JoinRefusesSplitBuffersOnEveryRank) {
  run_on_ranks(4, [](const RankContext& rank) {
    const auto mesh = mesh_2d(rank, 2, 2, "grid", {"dp", "cp"});
    const auto joined = [&](bool broadcasts) {
      const auto net = std::make_shared<TableNet>(8);
      DistributedDataParallel ddp(net, {.mesh = rank.mesh, .broadcast_buffers = broadcasts});
      ddp->join([&] {
        if (mesh.get_local_rank("dp") == 1) return;
        auto tokens = table_net_tokens(8);
        const auto scope = context_parallel(net, mesh["cp"], {tokens, net->table}, {1, 0}, ring_reduced_by_ddp());
        ddp->forward(tokens, scope.position_ids()).sum().backward();
      });
    };
    EXPECT_CONTAINS(error_of<c10::NotImplementedError>([&] { joined(true); }), "splits buffers of the module");
    EXPECT_EQ(error_of([&] { joined(false); }), "");
  });
}

TEST(SequenceState, WholeWeightsAreRefusedWhileABufferIsSplit) {
  run_on_ranks(2, [](const RankContext& rank) {
    const ScratchDirectory directory;
    const auto net = std::make_shared<TableNet>(8);
    fully_shard(net, {.mesh = rank.mesh});
    const auto weights = state_dict(*net);
    const auto complaint = "buffer 'table' holds only this rank's part of it inside context_parallel";
    {
      const auto scope = context_parallel(net, rank.mesh, {net->table}, {0});
      EXPECT_CONTAINS(error_of([&] { (void)state_dict(*net); }), complaint);
      EXPECT_CONTAINS(error_of([&] { (void)full_state_dict(*net); }), complaint);
      EXPECT_CONTAINS(error_of([&] { save_full_state_dict(*net, directory.file("net.pt")); }), complaint);
      EXPECT_CONTAINS(error_of([&] { load_state_dict(*net, weights); }), complaint);
      const auto x = torch::ones({1, 2, 4, 4});
      (void)at::scaled_dot_product_attention(x, x, x);
    }
    const auto whole = full_state_dict(*net);
    if (rank.rank() == 0) {
      EXPECT_EQ(whole["table"].size(0), 8);
    }
  });
}

}  // namespace
}  // namespace fsdp::testing
