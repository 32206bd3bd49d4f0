// The ranks of a group meet in the store before a collective that only some of them might want.
#include "comm/meeting.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <random>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/group_state.h"
#include "support/errors.h"
#include "support/run_ranks.h"

namespace fsdp {
namespace {

using comm::Meeting;
using comm::meeting_of;
using testing::run_ranks;
using namespace std::chrono_literals;

// Every rank a thread with its own Meeting over one store, as processes have.
void run_meetings(int world_size, std::chrono::milliseconds timeout,
                  const std::function<void(Meeting& meeting, int rank)>& body) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> errors(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        Meeting meeting(store, rank, world_size, timeout);
        body(meeting, rank);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

TEST(Meeting, ComparesTheSubjectWhereThereIsOne) {
  run_ranks(2, [](const ProcessGroup& group, int rank) {
    const auto meeting = meeting_of(group);
    meeting->meet(rank == 0 ? "sum of a" : "norm of b", "group ab");
    EXPECT_EQ(meeting->num_meetings(), 1);
    EXPECT_ERROR(meeting->meet("sum of a", rank == 0 ? "group ab" : "group cd"), c10::DistError,
                 "reads sum of a as a full tensor");
  });
}

TEST(Meeting, AllRanksMeetManyTimes) {
  for (const int world_size : {1, 2, 3, 4}) {
    run_meetings(world_size, 60s, [&](Meeting& meeting, int) {
      for (int i = 0; i < 50; ++i) meeting.meet("value " + std::to_string(i));
      EXPECT_EQ(meeting.num_meetings(), world_size == 1 ? 0 : 50);
    });
  }
}

TEST(Meeting, OldKeysLeaveTheStore) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      Meeting meeting(store, rank, 3, 60s);
      for (int i = 0; i < 40; ++i) meeting.meet("x");
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_LE(store->getNumKeys(), 4);
}

TEST(Meeting, OneRankOnlyIsTold) {
  run_meetings(2, 200ms, [](Meeting& meeting, int rank) {
    if (rank != 0) return;
    EXPECT_ERROR(
        meeting.meet("aten::norm of layers.0.weight"), c10::DistError,
        "rank 0 reads aten::norm of layers.0.weight as a full tensor, but ranks [1] did not come within 0.1 s: "
        "call it on every rank, or use to_local()");
  });
}

TEST(Meeting, DifferentReadsFailOnBothAtOnceAndACommonOneWorksAfterwards) {
  run_meetings(2, 600s, [](Meeting& meeting, int rank) {
    EXPECT_ERROR(
        meeting.meet(rank == 0 ? "item of a" : "item of b"), c10::DistError,
        rank == 0 ? "rank 0 reads item of a as a full tensor, but " : "rank 1 reads item of b as a full tensor, but ");
    meeting.meet("item of c");
    EXPECT_EQ(meeting.num_meetings(), 1);
  });
}

TEST(Meeting, AMismatchNamesBothSides) {
  std::atomic<int> num_waiting{0};
  std::atomic<int> num_came{0};
  run_meetings(2, 600s, [&](Meeting& meeting, int rank) {
    try {
      meeting.meet(rank == 0 ? "a" : "b");
    } catch (const c10::DistError& error) {
      const std::string text = error.what_without_backtrace();
      num_waiting += text.find(rank == 0 ? "rank 1 came to read b" : "rank 0 came to read a") != std::string::npos;
      num_came += text.find(rank == 0 ? "ranks [1] wait to read b" : "ranks [0] wait to read a") != std::string::npos;
    }
  });
  EXPECT_EQ(num_waiting, 1);
  EXPECT_EQ(num_came, 1);
}

// False when the others did not come in time; a rank that gave up may try again.
bool met(Meeting& meeting, const std::string& what) {
  try {
    meeting.meet(what);
    return true;
  } catch (const c10::DistError&) {
    return false;
  }
}

TEST(Meeting, AfterALonelyReadAllMeetAgain) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::promise<void> gave_up;
  const auto lonely_read_is_over = gave_up.get_future().share();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      Meeting meeting(store, rank, 3, rank == 1 ? 100ms : 120000ms);
      if (rank == 1) {
        EXPECT_ERROR(meeting.meet("lonely"), c10::DistError, "ranks [0, 2] did not come");
        gave_up.set_value();
        // This rank's patience is short: the others may need a few tries to find it waiting.
        while (!met(meeting, "common")) continue;
        return;
      }
      lonely_read_is_over.wait();
      while (!met(meeting, "common")) continue;
    });
  }
  for (auto& thread : threads) thread.join();
}

// Ranks give up at random moments while others arrive: each round either all meet or all who came fail, and a rank that
// missed a failed meeting finds the next one.
TEST(Meeting, GivingUpRacesWithArriving) {
  constexpr int kNumRanks = 3;
  constexpr int kNumRounds = 40;
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::array<std::atomic<int>, kNumRounds> num_met{};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kNumRanks; ++rank) {
    threads.emplace_back([&, rank] {
      std::mt19937 random(rank);
      Meeting meeting(store, rank, kNumRanks, 20ms);
      for (int round = 0; round < kNumRounds; ++round) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 12000));
        while (!met(meeting, "round " + std::to_string(round))) continue;
        ++num_met[round];
      }
      EXPECT_EQ(meeting.num_meetings(), kNumRounds);
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& count : num_met) EXPECT_EQ(count, kNumRanks);
}

TEST(Meeting, CompareGivesOneComplaintToAll) {
  run_meetings(3, 60s, [](Meeting& meeting, int rank) {
    const auto compare = [&](const std::string& first) {
      return first == "same" ? std::string() : "rank " + std::to_string(rank) + " differs from " + first;
    };
    EXPECT_EQ(meeting.compare_with_rank0("weights of a", "same", compare), "");
    const std::string complaint = meeting.compare_with_rank0("weights of b", "other", compare);
    EXPECT_TRUE(complaint == "rank 1 differs from other" || complaint == "rank 2 differs from other") << complaint;
    EXPECT_EQ(meeting.compare_with_rank0("weights of c", "same", compare), "");
  });
}

TEST(Meeting, CompareOfDifferentThingsFailsOnAll) {
  run_meetings(2, 600s, [](Meeting& meeting, int rank) {
    EXPECT_ERROR(std::ignore = meeting.compare_with_rank0(rank == 0 ? "a" : "b", "", [](auto&) { return ""; }),
                 c10::DistError, "in the same order");
  });
}

TEST(GroupState, IsPerGroupAndLivesAsLongAsIt) {
  run_ranks(2, [](const ProcessGroup& group, int) {
    EXPECT_EQ(group_timeout(group), 30s);
    EXPECT_EQ(meeting_of(group), meeting_of(group));
    meeting_of(group)->meet("x");
    std::weak_ptr<comm::GroupState> state;
    {
      auto store = c10::make_intrusive<c10d::HashStore>();
      auto own = make_process_group(store, 0, 1);
      EXPECT_NE(meeting_of(own), meeting_of(group));
      state = comm::state_of(own);
    }
    auto fresh = make_process_group(c10::make_intrusive<c10d::HashStore>(), 0, 1);
    EXPECT_EQ(group_timeout(fresh), 10min);
    EXPECT_TRUE(state.expired());
  });
}

}  // namespace
}  // namespace fsdp
