// Process groups of real processes: start, end, lost peers, contradictions.
#include <fsdp/process_group.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/collectives.h"
#include "comm/gloo_backend.h"
#include "support/errors.h"
#include "support/scoped_environment.h"
#include "support/spawn_ranks.h"

namespace fsdp {
namespace {

using ::testing::HasSubstr;
using testing::ScopedEnvironment;
using testing::spawn_ranks;
using testing::SpawnedRanks;
using testing::SpawnOptions;
using namespace std::chrono_literals;

// 1 + 2 + ... + W, by all ranks together.
void expect_reduction_works(const ProcessGroup& group) {
  const auto value = torch::full({2}, group->getRank() + 1, torch::kFloat);
  for (auto& pending : comm::all_reduce({value}, group, "x")) pending.wait();
  EXPECT_EQ(value[0].item<int>(), group->getSize() * (group->getSize() + 1) / 2);
}

RANKS_BODY(pg_init_reduce_destroy) {
  EXPECT_FALSE(is_initialized());
  EXPECT_ERROR(std::ignore = rank(), c10::Error, "call fsdp::init_process_group() first");
  EXPECT_ERROR(destroy_process_group(), c10::Error, "there is no default process group");
  init_process_group({.timeout = 30s});
  EXPECT_TRUE(is_initialized());
  EXPECT_EQ(rank(), std::stoi(std::getenv("RANK")));
  EXPECT_EQ(local_rank(), rank());
  EXPECT_EQ(world_size(), std::stoi(std::getenv("WORLD_SIZE")));
  EXPECT_EQ(group_timeout(default_group()), 30s);
  EXPECT_ERROR(init_process_group(), c10::Error, "initialised already");
  expect_reduction_works(default_group());
  destroy_process_group();
  EXPECT_FALSE(is_initialized());
}

TEST(ProcessGroup, InitReduceDestroy) {
  for (const int size : {1, 2, 3}) EXPECT_ALL_RANKS_OK(spawn_ranks(size, "pg_init_reduce_destroy"));
}

TEST(ProcessGroup, RankZeroHostsTheStoreWithoutALauncher) {
  EXPECT_ALL_RANKS_OK(spawn_ranks(2, "pg_init_reduce_destroy", {.agent_store = false}));
}

RANKS_BODY(pg_init_again) {
  for (int round = 0; round < 3; ++round) {
    init_process_group({.timeout = 30s});
    expect_reduction_works(default_group());
    destroy_process_group();
  }
  setenv("MASTER_PORT", std::getenv("SECOND_PORT"), 1);
  init_process_group({.timeout = 30s});
  expect_reduction_works(default_group());
  destroy_process_group();
}

TEST(ProcessGroup, DestroyAndInitAgainAlsoUnderAnotherPort) {
  const auto port = std::to_string(testing::find_free_port());
  EXPECT_ALL_RANKS_OK(spawn_ranks(2, "pg_init_again", {.environment = {{"SECOND_PORT", port}}, .agent_store = false}));
}

RANKS_BODY(pg_exit_without_destroy) {
  init_process_group({.timeout = 600s});
  auto group = default_group();
  auto finished = comm::broadcast(torch::ones({2}), 0, group, "finished");
  finished.wait();
  // Rank 1 never starts its part of this one.
  if (rank() == 0) static auto pending = comm::all_reduce({torch::ones({2})}, group, "pending");
}

TEST(ProcessGroup, ExitWithoutDestroyingIsClean) {
  for (int round = 0; round < 5; ++round) {
    EXPECT_ALL_RANKS_OK(spawn_ranks(2, "pg_exit_without_destroy", {.limit = 30s, .agent_store = round % 2 == 0}));
  }
}

RANKS_BODY(pg_lost_peer) {
  init_process_group({.timeout = 60s});
  expect_reduction_works(default_group());
  if (rank() == 1) {
    std::puts("ready to die");
    std::fflush(stdout);
    while (true) pause();
  }
  const auto part = torch::ones({4});
  EXPECT_ERROR(comm::all_gather(torch::empty({8}), part, default_group(), "blocks.3").wait(), c10::DistError,
               "rank 0 of 2: all_gather of blocks.3 failed: ");
}

TEST(ProcessGroup, ALostPeerIsAnErrorThatNamesTheCollective) {
  SpawnedRanks ranks(2, "pg_lost_peer", {.limit = 30s});
  ASSERT_TRUE(ranks.rank(1).wait_for_output("ready to die", 30s)) << ranks.rank(1).output();
  ranks.rank(1).signal(SIGKILL);
  const auto result = ranks.wait();
  EXPECT_EQ(result.ranks[0].status.code, 0) << result.describe();
  EXPECT_EQ(result.ranks[1].status.signal, SIGKILL);
}

RANKS_BODY(pg_one_rank_throws) {
  init_process_group({.timeout = 60s});
  TORCH_CHECK(rank() != 1, "rank 1 has a bug");
  expect_reduction_works(default_group());
}

TEST(ProcessGroup, WhenOneRankThrowsTheOthersFail) {
  const auto result = spawn_ranks(3, "pg_one_rank_throws", {.limit = 50s});
  EXPECT_FALSE(result.timed_out);
  for (const auto& rank : result.ranks) EXPECT_EQ(rank.status.code, 1) << result.describe();
  EXPECT_THAT(result.ranks[1].output, HasSubstr("rank 1 has a bug"));
  EXPECT_THAT(result.ranks[0].output, HasSubstr("rank 0 of 3: all_reduce of x failed"));
}

RANKS_BODY(pg_peer_does_not_join) {
  if (std::string(std::getenv("RANK")) == "1") return;
  EXPECT_ERROR(init_process_group({.timeout = 1s}), c10::DistError, "ranks [1] of 2 did not join within 1.0 s");
}

TEST(ProcessGroup, APeerThatDoesNotJoinIsNamed) {
  EXPECT_ALL_RANKS_OK(spawn_ranks(2, "pg_peer_does_not_join", {.limit = 30s}));
}

RANKS_BODY(pg_contradicting_world_size) {
  if (std::string(std::getenv("RANK")) == "1") setenv("WORLD_SIZE", "3", 1);
  EXPECT_ERROR(init_process_group({.timeout = 60s}), c10::ValueError, "WORLD_SIZE is ");
}

RANKS_BODY(pg_same_rank_twice) {
  if (std::string(std::getenv("RANK")) == "2") setenv("RANK", "1", 1);
  EXPECT_ERROR(init_process_group({.timeout = 60s}), c10::ValueError, "two processes have RANK=1");
}

TEST(ProcessGroup, RanksThatContradictEachOtherAllFailAtOnce) {
  EXPECT_ALL_RANKS_OK(spawn_ranks(2, "pg_contradicting_world_size", {.limit = 30s}));
  EXPECT_ALL_RANKS_OK(spawn_ranks(3, "pg_same_rank_twice", {.limit = 30s, .agent_store = false}));
}

// A third process that comes as rank 1 of 2 when both are there and at work.
RANKS_BODY(pg_late_duplicate) {
  const bool is_late = std::string(std::getenv("RANK")) == "2";
  for (const auto* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) setenv(name, "2", 1);
  c10d::TCPStoreOptions client;
  client.port = static_cast<uint16_t>(std::stoi(std::getenv("MASTER_PORT")));
  client.waitWorkers = false;
  if (is_late) {
    for (const auto* name : {"RANK", "LOCAL_RANK"}) setenv(name, "1", 1);
    c10d::TCPStore store(std::getenv("MASTER_ADDR"), client);
    store.wait({"both are there"}, 30s);
    EXPECT_ERROR(init_process_group({.timeout = 60s}), c10::ValueError, "two processes have RANK=1");
    return static_cast<c10d::Store&>(store).set("refused", std::string("yes"));
  }
  init_process_group();
  c10d::TCPStore store(std::getenv("MASTER_ADDR"), client);
  if (rank() == 0) static_cast<c10d::Store&>(store).set("both are there", std::string("yes"));
  store.wait({"refused"}, 30s);
  expect_reduction_works(default_group());
  destroy_process_group();
}

TEST(ProcessGroup, ALateDuplicateFailsAlone) {
  EXPECT_ALL_RANKS_OK(spawn_ranks(3, "pg_late_duplicate", {.agent_store = false}));
}

RANKS_BODY(pg_port_in_use) {
  EXPECT_ERROR(init_process_group({.timeout = 5s}), c10::DistError,
               std::string("port ") + std::getenv("MASTER_PORT") + " is in use");
}

TEST(ProcessGroup, APortInUseIsNamed) {
  // The store of this process occupies the port; the rank believes that it has to host one itself.
  EXPECT_ALL_RANKS_OK(
      spawn_ranks(1, "pg_port_in_use", {.limit = 30s, .environment = {{"TORCHELASTIC_USE_AGENT_STORE", "False"}}}));
}

RANKS_BODY(pg_new_group) {
  init_process_group({.timeout = 30s});
  const auto outer = new_group({2, 0}, "outer");
  const auto middle = new_group({1});
  EXPECT_EQ(outer.defined(), rank() != 1);
  EXPECT_EQ(middle.defined(), rank() == 1);
  if (outer) {
    EXPECT_EQ(outer->getRank(), rank() / 2);  // in ascending order of ranks
    EXPECT_EQ(outer->getGroupDesc(), "outer");
    EXPECT_EQ(group_timeout(outer), 30s);
    expect_reduction_works(outer);
  }
  EXPECT_ERROR(std::ignore = new_group({}), c10::ValueError, "empty");
  EXPECT_ERROR(std::ignore = new_group({0, 0}), c10::ValueError, "names a rank twice");
  EXPECT_ERROR(std::ignore = new_group({3}), c10::ValueError, "outside 0 to 2");
  expect_reduction_works(new_group({0, 1, 2}));
}

TEST(ProcessGroup, NewGroupHoldsSomeRanks) { EXPECT_ALL_RANKS_OK(spawn_ranks(3, "pg_new_group")); }

RANKS_BODY(pg_own_backend) {
  register_backend("loopback", {c10::kCPU}, comm::make_gloo_backend);
  EXPECT_ERROR(register_backend("gloo", {c10::kCPU}, comm::make_gloo_backend), c10::ValueError, "\"gloo\" is taken");
  EXPECT_ERROR(register_backend("empty", {c10::kCPU}, nullptr), c10::ValueError, "factory is empty");
  EXPECT_ERROR(init_process_group({.backend = "ncl"}), c10::ValueError,
               "no backend is registered as \"ncl\"; known: gloo, loopback");
  EXPECT_ERROR(init_process_group({.timeout = 0s}), c10::ValueError, "timeout is 0 ms");
  init_process_group({.backend = "loopback", .timeout = 30s});
  expect_reduction_works(default_group());
}

TEST(ProcessGroup, BackendsAreFoundByName) { EXPECT_ALL_RANKS_OK(spawn_ranks(2, "pg_own_backend")); }

RANKS_BODY(pg_interface) {
  const std::string name = std::getenv("GLOO_SOCKET_IFNAME");
  if (name == "lo") {
    init_process_group({.timeout = 30s});
    expect_reduction_works(default_group());
    return;
  }
  EXPECT_ERROR(init_process_group({.timeout = 30s}), c10::ValueError, "one interface name is needed");
}

TEST(ProcessGroup, TheInterfaceVariableTakesOneName) {
  for (const std::string name : {"lo", "^lo", "lo,eth0"}) {
    EXPECT_ALL_RANKS_OK(spawn_ranks(2, "pg_interface", {.environment = {{"GLOO_SOCKET_IFNAME", name}}}));
  }
}

RANKS_BODY(pg_host_name) {
  if (unshare(CLONE_NEWUTS) != 0) {
    std::puts("no private host name here");
    return;
  }
  const std::string name = std::getenv("OWN_HOST_NAME");
  ASSERT_EQ(sethostname(name.c_str(), name.size()), 0);
  init_process_group({.timeout = 20s});
  expect_reduction_works(default_group());
}

TEST(ProcessGroup, TheHostNameNeedNotResolve) {
  for (const std::string name : {"no-such-host.invalid", "1.0.0.127.in-addr.arpa"}) {
    const auto result = spawn_ranks(2, "pg_host_name", {.environment = {{"OWN_HOST_NAME", name}}});
    if (result.ranks[0].output.find("no private host name") != std::string::npos) {
      GTEST_SKIP() << "this system does not let a process change its own host name";
    }
    EXPECT_TRUE(result.all_ok()) << result.describe();
  }
}

}  // namespace
}  // namespace fsdp
