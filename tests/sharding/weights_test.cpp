// Whole weights in and out of a sharded module.
#include "support/parity.h"
#include "support/scratch_directory.h"

namespace fsdp::testing {
namespace {

TEST(Weights, PlainCheckpointIsLoadedShardByShard) {
  for (int size : {1, 2, 3, 4}) {
    const ScratchDirectory scratch;
    auto source = net_of<ConvNet>()();
    fill_parameters(*source, 77);
    source->forward(source->batch(4, seeded(1)));  // moves the running statistics
    torch::save(source, scratch.file("plain.pt"));
    run_on_ranks(size, [&](const RankContext& rank) {
      Twins twins(rank, net_of<ConvNet>());
      twins.backward();  // gathered copies and prefetches of the old values exist
      twins.zero_grad();
      const auto before = twins.stats().num_all_gathers;
      torch::load(twins.plain, scratch.file("plain.pt"));
      torch::load(twins.sharded, scratch.file("plain.pt"));
      EXPECT_EQ(twins.stats().num_all_gathers, before);
      EXPECT_TRUE(DTensor::is(twins.q[0]));
      EXPECT_SAME_PARAMETERS(twins, 0);
      EXPECT_LE(difference(source->parameters(), twins.q), 0);
      EXPECT_LE(difference(twins.plain->buffers(), twins.sharded->buffers()), 0);
      twins.plain->eval();
      twins.sharded->eval();
      twins.backward();
      EXPECT_SAME_GRADS(twins, kClose);
    });
  }
}

TEST(Weights, FullStateDictIsOnRankZero) {
  for (int size : {1, 2, 3, 4}) {
    run_on_ranks(size, [&](const RankContext& rank) {
      Twins twins(rank, net_of<ConvNet>());
      const auto weights = full_state_dict(*twins.sharded);
      if (rank.rank() != 0) {
        EXPECT_TRUE(weights.is_empty());
        return;
      }
      auto expected = twins.plain->named_parameters();
      for (const auto& buffer : twins.plain->named_buffers()) {
        expected.insert(buffer.key(), buffer.value());
      }
      EXPECT_EQ(weights.size(), expected.size());
      for (const auto& item : expected) {
        ASSERT_TRUE(weights.contains(item.key())) << item.key();
        EXPECT_FALSE(DTensor::is(weights[item.key()])) << item.key();
        EXPECT_LE(difference(item.value(), weights[item.key()]), 0) << item.key();
      }
    });
  }
}

TEST(Weights, SavedFileIsReadByAPlainProgram) {
  for (int size : {1, 2, 3, 4}) {
    const ScratchDirectory scratch;
    run_on_ranks(size, [&](const RankContext& rank) {
      Twins twins(rank, net_of<ConvNet>());
      save_full_state_dict(*twins.sharded, scratch.file("full.pt"));
    });
    auto plain = std::make_shared<ConvNet>(), expected = std::make_shared<ConvNet>();
    fill_parameters(*expected, 5);
    torch::load(plain, scratch.file("full.pt"));
    EXPECT_LE(difference(expected->parameters(), plain->parameters()), 0);
    EXPECT_LE(difference(expected->buffers()[0], plain->buffers()[0]), 0);
  }
}

TEST(Weights, AFailedWriteIsAnErrorOnEveryRank) {
  for (int size : {1, 2, 3}) {
    run_on_ranks(size, [&](const RankContext& rank) {
      Twins twins(rank, net_of<Mlp>());
      const auto message = error_of([&] { save_full_state_dict(*twins.sharded, "/no/such/directory/full.pt"); });
      EXPECT_CONTAINS(message, "/no/such/directory/full.pt) failed");
      EXPECT_EQ(message.find("frame #"), std::string::npos) << message;  // no backtrace inside the message
      twins.backward();
      EXPECT_SAME_GRADS(twins, kClose);
    });
  }
}

TEST(Weights, CheckpointOfAnotherShapeIsRefused) {
  const ScratchDirectory scratch;
  torch::save(torch::nn::Linear(4, 6), scratch.file("other.pt"));
  run_on_ranks(2, [&](const RankContext& rank) {
    torch::nn::Linear net(4, 5);
    fill_parameters(*net, 1);
    const auto before = net->weight.detach().clone();
    fully_shard(net, {.mesh = rank.mesh});
    const auto message = error_of<c10::ValueError>([&] { torch::load(net, scratch.file("other.pt")); });
    EXPECT_CONTAINS(message, "loading the sharded tensor 'weight'");
    EXPECT_CONTAINS(message, "[5, 4], the given values [6, 4]");
    EXPECT_EQ(net->weight.sizes(), (at::IntArrayRef{5, 4}));
  });
}

}  // namespace
}  // namespace fsdp::testing
