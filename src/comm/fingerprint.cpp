#include "comm/fingerprint.h"

#include "comm/group_state.h"

namespace fsdp::comm {
namespace {

constexpr unsigned kHashBits = 40;
constexpr uint64_t kHashMask = (uint64_t{1} << kHashBits) - 1;

uint64_t hash_of(const std::string& text) { return std::hash<std::string>{}(text)&kHashMask; }

std::string text_of(const char* kind, const std::string& what, int64_t num_bytes) {
  return c10::str(kind, " of ", what, " (", num_bytes, " bytes)");
}

std::string text_of(uint64_t bits, const CollectiveLog& log) {
  const auto sequence = std::to_string(bits >> kHashBits);
  const auto known = log.names.find(bits & kHashMask);
  if (known == log.names.end()) return "collective #" + sequence + ", which this rank does not know";
  return "#" + sequence + ": " + known->second;
}

}  // namespace

void Fingerprint::remember(const ProcessGroup& group, const char* kind, const std::string& what, int64_t num_bytes) {
  auto text = text_of(kind, what, num_bytes);
  const auto state = state_of(group);
  const std::lock_guard lock(state->mutex);
  state->log.names.emplace(hash_of(text), std::move(text));
}

Fingerprint Fingerprint::next(const ProcessGroup& group, const char* kind, const std::string& what, int64_t num_bytes) {
  auto text = text_of(kind, what, num_bytes);
  const auto hash = hash_of(text);
  const auto state = state_of(group);
  const std::lock_guard lock(state->mutex);
  auto& log = state->log;
  const Fingerprint fingerprint((++log.sequence << kHashBits) | hash);
  log.names.emplace(hash, std::move(text));
  return fingerprint;
}

void Fingerprint::check(const ProcessGroup& group, const std::vector<uint64_t>& theirs) const {
  std::string difference;
  for (size_t rank = 0; rank < theirs.size(); ++rank) {
    if (theirs[rank] == bits_) continue;
    const auto state = state_of(group);
    const std::lock_guard lock(state->mutex);
    difference += c10::str(difference.empty() ? "" : "; ", "rank ", rank, " does ", text_of(theirs[rank], state->log));
  }
  if (!difference.empty()) fail(group, difference);
}

void Fingerprint::fail(const ProcessGroup& group, const std::string& difference) const {
  std::string own;
  {
    const auto state = state_of(group);
    const std::lock_guard lock(state->mutex);
    own = text_of(bits_, state->log);
  }
  C10_THROW_ERROR(DistError, c10::str("the ranks do not do the same thing: rank ", group->getRank(), " of ",
                                      group->getSize(), " does ", own, ", but ", difference,
                                      ". Every rank must use the same modules in the same order; FSDP_DEBUG=detail "
                                      "finds the first collective that differs"));
}

}  // namespace fsdp::comm
