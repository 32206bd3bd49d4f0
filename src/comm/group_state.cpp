#include "comm/group_state.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/immortal.h"
#include "comm/meeting.h"

namespace fsdp::comm {
namespace {

struct GroupTable {
  struct Entry {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
    std::shared_ptr<GroupState> state;
  };
  std::mutex mutex;
  std::unordered_map<const c10d::ProcessGroup*, Entry> entries;

  // Takes out the entries of groups that are gone.
  std::vector<Entry> take_dead() {
    std::vector<Entry> dead;
    for (auto it = entries.begin(); it != entries.end();) {
      const bool is_dead = it->second.group.expired();
      if (is_dead) dead.push_back(std::move(it->second));
      it = is_dead ? entries.erase(it) : std::next(it);
    }
    return dead;
  }
};

GroupTable& group_table() {
  static Immortal<GroupTable> table;
  return table.get();
}

}  // namespace

std::shared_ptr<GroupState> state_of(const ProcessGroup& group) {
  TORCH_CHECK_VALUE(group.defined(), "the process group is null: this rank is not part of it");
  auto& table = group_table();
  std::vector<GroupTable::Entry> dead;  // die after the lock: neighbours finish their pending work first
  const std::lock_guard lock(table.mutex);
  // A weak pointer keeps the address of a dead group taken, so a found entry is always this very group's.
  const auto found = table.entries.find(group.get());
  if (found != table.entries.end()) return found->second.state;
  dead = table.take_dead();
  auto state = std::make_shared<GroupState>();
  table.entries.emplace(group.get(), GroupTable::Entry{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), state});
  return state;
}

std::shared_ptr<Meeting> meeting_of(const ProcessGroup& group) {
  const auto state = state_of(group);
  const std::lock_guard lock(state->mutex);
  if (!state->meeting) {
    TORCH_CHECK_VALUE(group->getStore().defined() || group->getSize() == 1,
                      "the process group has no store, so its ranks ",
                      "cannot meet: make it with fsdp::make_process_group or fsdp::new_group");
    state->meeting = std::make_shared<Meeting>(group->getStore(), group->getRank(), group->getSize(), state->timeout);
  }
  return state->meeting;
}

void meet_on_change_to(const std::string& intent, const ProcessGroup& group) {
  const auto state = state_of(group);
  {
    const std::lock_guard lock(state->mutex);
    if (state->agreed == intent) return;
  }
  meeting_of(group)->meet_to(intent);
  const std::lock_guard lock(state->mutex);
  state->agreed = intent;
}

ProcessGroup neighbours_of(const ProcessGroup& group, int num_ranks) {
  const auto state = state_of(group);
  const std::lock_guard lock(state->mutex);
  auto& known = state->neighbours[num_ranks];
  if (known.defined()) return known;
  const int block = group->getRank() / num_ranks;
  const auto store =
      c10::make_intrusive<c10d::PrefixStore>(c10::str("fsdp/neighbours/", num_ranks, "/", block), group->getStore());
  // The group calls every backend "custom" that LibTorch does not know; the backend knows its name.
  known = make_process_group(store, group->getRank() % num_ranks, num_ranks,
                             {.backend = group->getDefaultBackend()->getBackendName(), .timeout = state->timeout});
  return known;
}

}  // namespace fsdp::comm
