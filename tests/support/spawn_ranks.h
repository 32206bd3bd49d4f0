#pragma once
// Ranks as real processes: the test program starts itself again, once a rank, and runs a named body there.
//
//   RANKS_BODY(all_reduce_of_ranks) {
//     fsdp::init_process_group();
//     ...                                            // EXPECT_* and exceptions make the rank exit with 1
//   }
//   TEST(Comm, AllReduce) { EXPECT_ALL_RANKS_OK(spawn_ranks(2, "all_reduce_of_ranks")); }
#include <gtest/gtest.h>

#include <functional>
#include <memory>

#include "support/child_process.h"

namespace fsdp::testing {

struct SpawnOptions {
  std::chrono::seconds limit{60};    // then every rank is killed
  EnvironmentChanges environment{};  // of every rank
  // True: this process hosts the store, so that no port can be taken in between. False: rank 0 does, on a free port.
  bool agent_store = true;
};

struct RankResult {
  ExitStatus status;
  std::string output;
};

struct SpawnResult {
  std::vector<RankResult> ranks;
  bool timed_out = false;

  [[nodiscard]] bool all_ok() const;
  [[nodiscard]] std::string describe() const;  // exits and outputs of all ranks
};

// Ranks that run while the test goes on.
class SpawnedRanks {
 public:
  SpawnedRanks(int world_size, const std::string& body, const SpawnOptions& options = {});
  ~SpawnedRanks();

  [[nodiscard]] ChildProcess& rank(int index) { return *children_.at(index); }
  // The ends of all ranks; kills those that still run at the limit.
  [[nodiscard]] SpawnResult wait();

 private:
  struct Store;
  std::unique_ptr<Store> store_;
  std::chrono::steady_clock::time_point deadline_;
  std::vector<std::unique_ptr<ChildProcess>> children_;
};

[[nodiscard]] SpawnResult spawn_ranks(int world_size, const std::string& body, const SpawnOptions& options = {});

// A TCP port of this host that nobody listens on right now.
[[nodiscard]] int find_free_port();

// Registers a body; returns true so that a static can hold the call.
bool register_ranks_body(const std::string& name, std::function<void()> body);

// For main(): runs the body this process was started for. nullopt when it was started as a plain test program.
[[nodiscard]] std::optional<int> run_selected_body();

}  // namespace fsdp::testing

#define RANKS_BODY(name)                                                    \
  static void fsdp_ranks_body_##name();                                     \
  [[maybe_unused]] static const bool fsdp_registered_##name =               \
      ::fsdp::testing::register_ranks_body(#name, &fsdp_ranks_body_##name); \
  static void fsdp_ranks_body_##name()

#define EXPECT_ALL_RANKS_OK(result)                              \
  do {                                                           \
    const ::fsdp::testing::SpawnResult fsdp_result = result;     \
    EXPECT_TRUE(fsdp_result.all_ok()) << fsdp_result.describe(); \
  } while (false)
