#pragma once
// What this library keeps beside each process group.
#include <fsdp/process_group.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace fsdp::comm {

class Meeting;

// The collectives that carry a fingerprint, for comparison and messages.
struct CollectiveLog {
  uint64_t sequence = 0;
  std::unordered_map<uint64_t, std::string> names;  // by hash; as many as there are groups
};

struct GroupState {
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  std::vector<int> global_ranks;  // in the default group, by group rank; empty for a group made outside it
  std::mutex mutex;               // guards what follows
  std::shared_ptr<Meeting> meeting;
  std::string agreed;  // the last intent of meet_on_change_to
  CollectiveLog log;
  std::map<int, ProcessGroup> neighbours;  // by size
};

// Made on demand; goes some time after the group died.
[[nodiscard]] std::shared_ptr<GroupState> state_of(const ProcessGroup& group);

// The place where the ranks of `group` meet.
[[nodiscard]] std::shared_ptr<Meeting> meeting_of(const ProcessGroup& group);

// Meeting::meet_to where this rank comes with another intent than the last time; the same one again costs a look-up.
// For what ranks repeat: a rank whose shapes or options change while those of the others do not is found before a
// collective mixes them up (gloo ends the process on messages of different sizes).
void meet_on_change_to(const std::string& intent, const ProcessGroup& group);

// The ranks of `group` cut into blocks of `num_ranks` consecutive ones; the block of the calling rank. Every rank of
// the block calls it. `num_ranks` divides the size of `group`.
[[nodiscard]] ProcessGroup neighbours_of(const ProcessGroup& group, int num_ranks);

}  // namespace fsdp::comm
