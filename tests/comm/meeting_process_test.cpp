// Meetings of real processes, over the store of a launcher or of rank 0.
#include <gtest/gtest.h>

#include "comm/group_state.h"
#include "comm/meeting.h"
#include "support/errors.h"
#include "support/spawn_ranks.h"

namespace fsdp {
namespace {

using comm::meeting_of;
using testing::spawn_ranks;
using namespace std::chrono_literals;

RANKS_BODY(meeting_of_processes) {
  init_process_group({.timeout = 60s});
  // Short patience only once all are there: processes may start seconds apart.
  const auto store = c10::make_intrusive<c10d::PrefixStore>("short", default_group()->getStore());
  const auto group = make_process_group(store, rank(), 2, {.timeout = 6s});
  const auto meeting = meeting_of(group);
  for (int i = 0; i < 20; ++i) meeting->meet("value " + std::to_string(i));
  if (rank() == 0) {
    EXPECT_ERROR(meeting->meet("lonely"), c10::DistError, "but ranks [1] did not come within 3.0 s");
    store->set("gave up", "1");
  } else {
    store->wait({"gave up"}, 30s);
  }
  meeting->meet("common");
  EXPECT_ERROR(meeting->meet("value of rank " + std::to_string(rank())), c10::DistError, "reads value of rank");
  meeting->meet("common again");
  EXPECT_EQ(meeting->compare_with_rank0("ranks", std::to_string(rank()),
                                        [](const std::string& first) { return "rank 0 says " + first; }),
            "rank 0 says 0");
  EXPECT_EQ(meeting->num_meetings(), 23);
}

TEST(MeetingProcess, LonelyAndDifferentReadsFailAndCommonOnesWork) {
  EXPECT_ALL_RANKS_OK(spawn_ranks(2, "meeting_of_processes"));
  EXPECT_ALL_RANKS_OK(spawn_ranks(2, "meeting_of_processes", {.agent_store = false}));
}

RANKS_BODY(meeting_without_store) {
  init_process_group({.timeout = 60s});
  const auto meeting = meeting_of(default_group());
  meeting->meet("first");
  if (rank() == 0) return;  // takes the store along
  EXPECT_ERROR(meeting->meet("second"), c10::DistError,
               "rank 1 reads second as a full tensor, but the store of the group");
}

TEST(MeetingProcess, ALostStoreIsAnErrorAndNoHang) {
  EXPECT_ALL_RANKS_OK(spawn_ranks(2, "meeting_without_store", {.limit = 50s, .agent_store = false}));
}

}  // namespace
}  // namespace fsdp
