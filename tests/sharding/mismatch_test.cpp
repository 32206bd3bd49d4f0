// Ranks that do not use the same groups: every rank gets an error, and no two different collectives meet in the
// backend.
#include "support/parity.h"

namespace fsdp::testing {
namespace {

// `uses_block` decides whether this rank runs block `index`.
std::string error_of_partial_step(Twins& twins, const std::function<bool(int index)>& uses_block) {
  auto& net = Twins::as<Blocks>(*twins.sharded);
  return error_of<c10::Error>([&] {
    auto h = net.in->forward(twins.part);
    for (int i = 0; i < static_cast<int>(net.blocks.size()); ++i) {
      if (uses_block(i)) {
        h = net.blocks[i]->forward(h);
      }
    }
    net.out->forward(h).sum().backward();
    for (const auto& parameter : twins.q) {
      if (parameter.grad().defined()) {
        (void)DTensor(parameter.grad()).to_local();
      }
    }
  });
}

TEST(Mismatch, AGroupUsedOnOneRankOnlyIsAnErrorOnEveryRank) {
  for (int skipped : {0, 1, 3}) {
    run_on_ranks(
        2,
        [&](const RankContext& rank) {
          Twins twins(rank, net_of<Blocks>());
          for (int step = 0; step < 2; ++step) {
            twins.sharded->loss(twins.part).backward();
          }
          twins.zero_grad();
          EXPECT_NE(error_of_partial_step(twins, [&](int i) { return i != skipped || rank.rank() == 0; }), "")
              << "block " << skipped;
        },
        std::chrono::seconds(3));
  }
}

}  // namespace
}  // namespace fsdp::testing
