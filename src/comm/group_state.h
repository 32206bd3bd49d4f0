#pragma once
// What this library keeps beside each process group.
#include <fsdp/process_group.h>

#include <memory>

namespace fsdp::comm {

class Meeting;

struct GroupState {
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  std::vector<int> global_ranks;  // in the default group, by group rank; empty for a group made outside it
  std::mutex mutex;               // guards the creation of what follows
  std::shared_ptr<Meeting> meeting;
};

// Made on demand; lives until the group dies.
[[nodiscard]] std::shared_ptr<GroupState> state_of(const ProcessGroup& group);

// The place where the ranks of `group` meet.
[[nodiscard]] std::shared_ptr<Meeting> meeting_of(const ProcessGroup& group);

}  // namespace fsdp::comm
