#include <c10/util/StringUtil.h>
#include <fsdp/process_group.h>

#include <atomic>
#include <numeric>
#include <set>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/duration.h"
#include "comm/environment.h"
#include "comm/error_kinds.h"
#include "comm/group_state.h"
#include "comm/immortal.h"
#include "comm/libtorch_version.h"
#include "comm/registry.h"
#include "comm/rendezvous.h"

namespace fsdp {
namespace {

struct World {
  ProcessGroup group;
  ProcessGroupOptions options;
  c10::intrusive_ptr<c10d::Store> store;
  int local_rank = 0;
  int num_new_groups = 0;
};

// The one process-wide default group. Never destroyed at exit: a backend's threads may still be at work then.
struct WorldSlot {
  std::mutex mutex;
  std::optional<World> world;
};

WorldSlot& world_slot() {
  static comm::Immortal<WorldSlot> slot;
  return slot.get();
}

// Calls `read` with the default world under its lock.
template <class Read>
auto with_world(const char* caller, Read read) {
  auto& slot = world_slot();
  const std::lock_guard lock(slot.mutex);
  TORCH_CHECK(slot.world.has_value(), caller,
              ": there is no default process group: call fsdp::init_process_group() first");
  return read(*slot.world);
}

std::string unique_group_name(const std::string& description) {
  static std::atomic<int> num_groups{0};
  return c10::str(description, "#", num_groups++);
}

ProcessGroup make_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                        const ProcessGroupOptions& options, const std::string& description) {
  comm::check_libtorch_version();
  const auto spec = comm::find_backend(options.backend);
  auto backend_store = c10::make_intrusive<c10d::PrefixStore>("backend", store);
  c10::intrusive_ptr<c10d::Backend> backend;
  try {
    backend = spec.factory({backend_store, rank, size, options.timeout});
  } catch (const std::exception& error) {
    if (comm::is_misuse(error)) throw;
    C10_THROW_ERROR(DistError,
                    c10::str("rank ", rank, " of ", size, ": ", options.backend, " cannot connect the ranks of ",
                             description, " within ", comm::to_seconds(options.timeout), ": ", comm::reason_of(error)));
  }
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  const auto type = c10d::ProcessGroup::strToBackendType(spec.name);
  for (const auto device_type : spec.device_types) group->setBackend(device_type, type, backend);
  group->setDefaultBackend(type);
  group->setGroupName(unique_group_name(description));
  group->setGroupDesc(description);
  comm::state_of(group)->timeout = options.timeout;
  return group;
}

void check_options(const ProcessGroupOptions& options) {
  TORCH_CHECK_VALUE(options.timeout.count() > 0, "ProcessGroupOptions::timeout is ", options.timeout.count(),
                    " ms, but a positive duration is needed");
  std::ignore = comm::find_backend(options.backend);
}

std::vector<int> checked_ranks(const std::vector<int>& ranks, int world_size) {
  TORCH_CHECK_VALUE(!ranks.empty(), "new_group: the list of ranks is empty");
  const std::set<int> sorted(ranks.begin(), ranks.end());
  TORCH_CHECK_VALUE(sorted.size() == ranks.size(), "new_group: [", c10::Join(", ", ranks), "] names a rank twice");
  TORCH_CHECK_VALUE(*sorted.begin() >= 0 && *sorted.rbegin() < world_size, "new_group: [", c10::Join(", ", ranks),
                    "] names ranks outside 0 to ", world_size - 1);
  return {sorted.begin(), sorted.end()};
}

}  // namespace

void init_process_group(const ProcessGroupOptions& options) {
  check_options(options);
  auto& slot = world_slot();
  const std::lock_guard lock(slot.mutex);
  TORCH_CHECK(!slot.world.has_value(),
              "the default process group is initialised already: call destroy_process_group() before another init");
  const auto env = comm::read_environment();
  World world;
  world.options = options;
  world.local_rank = env.local_rank;
  world.store = comm::join_world(env, options.timeout);
  world.group = make_group(c10::make_intrusive<c10d::PrefixStore>("default", world.store), env.rank, env.world_size,
                           options, "the default group");
  auto& ranks = comm::state_of(world.group)->global_ranks;
  ranks.resize(env.world_size);
  std::iota(ranks.begin(), ranks.end(), 0);
  slot.world = std::move(world);
}

void destroy_process_group() {
  auto& slot = world_slot();
  std::optional<World> world;
  {
    const std::lock_guard lock(slot.mutex);
    TORCH_CHECK(slot.world.has_value(), "destroy_process_group: there is no default process group");
    world.swap(slot.world);
  }
  // Dropped outside the lock: a backend finishes its pending work first.
}

bool is_initialized() {
  auto& slot = world_slot();
  const std::lock_guard lock(slot.mutex);
  return slot.world.has_value();
}

int rank() {
  return with_world("rank", [](World& world) { return world.group->getRank(); });
}

int world_size() {
  return with_world("world_size", [](World& world) { return world.group->getSize(); });
}

int local_rank() {
  return with_world("local_rank", [](World& world) { return world.local_rank; });
}

ProcessGroup default_group() {
  return with_world("default_group", [](World& world) { return world.group; });
}

ProcessGroup new_group(const std::vector<int>& ranks, const std::string& description) {
  World world = with_world("new_group", [](World& current) {
    World copy = current;
    ++current.num_new_groups;
    return copy;
  });
  const int own = world.group->getRank();
  const auto members = checked_ranks(ranks, world.group->getSize());
  const std::string list = c10::Join(", ", members);
  auto store = c10::make_intrusive<c10d::PrefixStore>(c10::str("group/", world.num_new_groups), world.store);
  const std::string agreed = store->compareSet("ranks", "", list);
  TORCH_CHECK_VALUE(agreed == list, "new_group: rank ", own, " asks for ranks [", list, "], another rank for [", agreed,
                    "] in the same call: every rank must pass the same list, in the same order of calls");
  const auto place = std::find(members.begin(), members.end(), own);
  if (place == members.end()) return {};
  auto group = make_group(store, static_cast<int>(place - members.begin()), static_cast<int>(members.size()),
                          world.options, description.empty() ? c10::str("ranks [", list, "]") : description);
  comm::state_of(group)->global_ranks = members;
  return group;
}

ProcessGroup make_process_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                const ProcessGroupOptions& options) {
  check_options(options);
  TORCH_CHECK_VALUE(store.defined(), "make_process_group: the store is null");
  TORCH_CHECK_VALUE(size >= 1 && rank >= 0 && rank < size, "make_process_group: rank ", rank, " of size ", size,
                    " is not from 0 to size - 1");
  return make_group(store, rank, size, options, "group");
}

std::chrono::milliseconds group_timeout(const ProcessGroup& group) { return comm::state_of(group)->timeout; }

}  // namespace fsdp
