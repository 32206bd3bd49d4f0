#include "comm/whereabouts.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace fsdp::comm {
namespace {

using namespace std::chrono_literals;

std::chrono::milliseconds patience_of(const ProcessGroup& group) {
  return std::clamp<std::chrono::milliseconds>(group_timeout(group) / 10, 200ms, 5s);
}

std::string key_of(int rank) { return std::to_string(rank); }

// What rank `rank` wrote; empty when it wrote nothing until `deadline`.
std::string word_of(c10d::Store& store, int rank, std::chrono::steady_clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  try {
    store.wait({key_of(rank)}, std::max(left, 1ms));
    return store.get_to_str(key_of(rank));
  } catch (const c10::DistStoreError&) {
    return "";
  }
}

std::string ask_everyone(const ProcessGroup& group, const std::string& waited_for) {
  c10d::PrefixStore store("fsdp/whereabouts", group->getStore());  // a new connection to a dead host would take long
  store.set(key_of(group->getRank()), waited_for);
  const auto deadline = std::chrono::steady_clock::now() + patience_of(group);
  std::vector<int> silent;
  std::vector<std::string> told;
  for (int rank = 0; rank < group->getSize(); ++rank) {
    if (rank == group->getRank()) continue;
    const auto word = word_of(store, rank, deadline);
    if (word.empty())
      silent.push_back(rank);
    else if (word != waited_for)
      told.push_back(c10::str("rank ", rank, " waited for ", word));
  }
  if (!silent.empty())
    told.insert(told.begin(),
                c10::str("ranks [", c10::Join(", ", silent), "] say nothing: gone, or still busy before it"));
  return told.empty() ? "all ranks waited for the same" : c10::Join("; ", told);
}

}  // namespace

std::string whereabouts(const ProcessGroup& group, const std::string& waited_for) {
  if (!group->getStore().defined()) return "the group has no store to ask the other ranks through";
  try {
    return ask_everyone(group, waited_for);
  } catch (const std::exception&) {
    return "the store of the group is gone, and with it probably the rank that held it (0)";
  }
}

}  // namespace fsdp::comm
