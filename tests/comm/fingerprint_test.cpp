// Fingerprints of collectives, and where the ranks were when one failed.
#include "comm/fingerprint.h"

#include <gtest/gtest.h>

#include "comm/collectives.h"
#include "comm/whereabouts.h"
#include "support/errors.h"
#include "support/run_ranks.h"
#include "support/spawn_ranks.h"

namespace fsdp::comm {
namespace {

using testing::run_ranks;
using testing::spawn_ranks;
using namespace std::chrono_literals;

TEST(Fingerprint, AgreesWhereRanksDoTheSame) {
  run_ranks(2, [](const ProcessGroup& group, int) {
    const auto first = Fingerprint::next(group, "all_gather", "layers.0", 64);
    const auto second = Fingerprint::next(group, "all_gather", "layers.0", 64);
    EXPECT_NE(first.bits(), second.bits()) << "the sequence number counts";
    first.check(group, {first.bits(), first.bits()});
  });
}

TEST(Fingerprint, SaysWhoDiffersAndHow) {
  run_ranks(2, [](const ProcessGroup& group, int) {
    const auto other = Fingerprint::next(group, "all_gather", "layers.1", 64);
    const auto own = Fingerprint::next(group, "all_gather", "layers.0", 64);
    EXPECT_ERROR(own.check(group, {own.bits(), other.bits()}), c10::DistError,
                 "rank 1 does #1: all_gather of layers.1 (64 bytes)");
    EXPECT_ERROR(own.check(group, {own.bits(), own.bits() ^ 1U}), c10::DistError, "which this rank does not know");
  });
}

TEST(Fingerprint, DigestsDifferToo) {
  run_ranks(1, [](const ProcessGroup& group, int) {
    std::set<uint32_t> digests;
    for (int i = 0; i < 200; ++i)
      digests.insert(Fingerprint::next(group, "reduce_scatter", "layers." + std::to_string(i), 64).digest() & 0xffffU);
    EXPECT_GT(digests.size(), 190U);
  });
}

TEST(Whereabouts, NamesTheRankThatDidNotCome) {
  run_ranks(
      3,
      [](const ProcessGroup& group, int rank) {
        if (rank == 2) return;  // gone
        const auto text = whereabouts(group, rank == 0 ? "all_gather of a" : "all_gather of b");
        EXPECT_NE(text.find("ranks [2] say nothing"), std::string::npos) << text;
        EXPECT_NE(text.find(rank == 0 ? "rank 1 waited for all_gather of b" : "rank 0 waited for all_gather of a"),
                  std::string::npos)
            << text;
      },
      3s);
}

RANKS_BODY(lagging_rank) {
  init_process_group({.timeout = 60s});
  const auto store = c10::make_intrusive<c10d::PrefixStore>("short", default_group()->getStore());
  const auto group = make_process_group(store, rank(), 2, {.timeout = 4s});
  if (rank() == 1) {  // busy with something else until the other one gave up
    store->wait({"gave up"}, 50s);
    return;
  }
  auto output = torch::zeros({4});
  EXPECT_ERROR(all_gather(output, torch::ones({2}), group, "layers.7.weight").wait(), c10::DistError,
               "all_gather of layers.7.weight failed");
  try {
    auto again = torch::zeros({4});
    all_gather(again, torch::ones({2}), group, "layers.7.weight").wait();
  } catch (const c10::DistError& error) {
    EXPECT_NE(std::string(error.what()).find("ranks [1] say nothing"), std::string::npos) << error.what();
  }
  store->set("gave up", "1");
}

TEST(Whereabouts, OfALaggingProcess) { EXPECT_ALL_RANKS_OK(spawn_ranks(2, "lagging_rank")); }

RANKS_BODY(detailed_checks) {
  init_process_group({.timeout = 20s});
  const auto group = default_group();
  auto whole = torch::zeros({4});
  all_gather(whole, torch::ones({2}), group, "layers.0").wait();
  EXPECT_EQ(whole.sum().item<float>(), 4);
  auto part = torch::zeros({2});
  reduce_scatter(part, torch::ones({4}), group, "layers.0").wait();
  EXPECT_EQ(part.sum().item<float>(), 4);
  const auto own = "layers." + std::to_string(rank());
  EXPECT_ERROR(all_gather(whole, torch::ones({2}), group, own).wait(), c10::DistError, "start all_gather of layers.");
}

TEST(FsdpDebug, DetailComparesEachCollectiveFirst) {
  EXPECT_ALL_RANKS_OK(spawn_ranks(2, "detailed_checks", {.environment = {{"FSDP_DEBUG", "detail"}}}));
}

RANKS_BODY(unknown_debug_level) {
  EXPECT_ERROR(init_process_group(), c10::ValueError, "FSDP_DEBUG is 'verbose'; known: off, detail");
}

TEST(FsdpDebug, UnknownValuesAreRefused) {
  EXPECT_ALL_RANKS_OK(spawn_ranks(1, "unknown_debug_level", {.environment = {{"FSDP_DEBUG", "verbose"}}}));
}

}  // namespace
}  // namespace fsdp::comm
