#include "comm/meeting.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/duration.h"
#include "comm/meeting_value.h"

namespace fsdp::comm {
namespace {

using MeetingState = MeetingValue::State;
constexpr const char* kEndSuffix = "/end";

// Compare-and-set; on failure `current` becomes what the key holds.
bool swap_value(c10d::Store& store, const std::string& key, MeetingValue& current, const MeetingValue& next) {
  const std::string wanted = next.to_string();
  const std::string found = store.compareSet(key, current.to_string(), wanted);
  if (found == wanted) return true;
  current = MeetingValue::parse(found);
  return false;
}

MeetingValue failed(const MeetingValue& current, std::string reason) {
  return {MeetingState::kFailed, current.ranks, std::move(reason)};
}

// An intent is what a rank is about to do, and on a second line, if there is one, what the others must agree with.
std::string sentence_of(const std::string& intent) { return intent.substr(0, intent.find('\n')); }

std::string subject_of(const std::string& intent) {
  const auto line = intent.find('\n');
  return line == std::string::npos ? intent : intent.substr(line + 1);
}

// "read X" -> "reads X"
std::string third_person(const std::string& intent) {
  auto sentence = sentence_of(intent);
  sentence.insert(std::min(sentence.find(' '), sentence.size()), "s");
  return sentence;
}

const char* meeting_advice(const std::string& intent) {
  return intent.starts_with("read") ? "call it on every rank, or use to_local()"
                                    : "call it on every rank, in the same order";
}

}  // namespace

Meeting::Meeting(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout)
    // A clone has a connection of its own: a rank that sleeps here does not block other users of the store.
    : store_(c10::make_intrusive<c10d::PrefixStore>("fsdp/meet", size > 1 ? store->clone() : store)),
      rank_(rank),
      size_(size),
      patience_(timeout / 2) {}

void Meeting::meet(const std::string& what, const std::string& subject) {
  const bool says_so = what.starts_with("full_tensor");
  meet_to(c10::str("read ", what, says_so ? "" : " as a full tensor", subject.empty() ? "" : "\n", subject));
}

void Meeting::meet_to(const std::string& intent) {
  if (size_ == 1) return;
  const std::lock_guard lock(mutex_);
  attend(intent);
}

std::string Meeting::compare_with_rank0(const std::string& topic, const std::string& record,
                                        const std::function<std::string(const std::string&)>& compare) {
  if (size_ == 1) return "";
  const std::lock_guard lock(mutex_);
  // First make sure that all compare the same thing, then exchange, then share the complaints.
  const std::string intent = c10::str("compare '", topic, "' with the other ranks");
  attend(intent);
  const std::string record_key = key_of(sequence_ - 1) + "/record";
  const std::string first = share_from_rank0(intent, record_key, record);
  const std::string complaint = rank_ == 0 ? "" : compare(first);
  const std::string found = attend(c10::str("conclude the comparison of '", topic, "'"), complaint);
  // Without a complaint all ranks came here, so all have read the record.
  if (rank_ == 0 && found.empty()) with_store(intent, [&] { store_->deleteKey(record_key); });
  return found;
}

int64_t Meeting::num_meetings() const {
  const std::lock_guard lock(mutex_);
  return num_meetings_;
}

std::string Meeting::share_from_rank0(const std::string& intent, const std::string& key, const std::string& record) {
  if (rank_ == 0) {
    with_store(intent, [&] { store_->set(key, record); });
    return record;
  }
  std::string first;
  with_store(intent, [&] {
    try {
      store_->wait({key}, patience_);
    } catch (const c10::DistStoreError&) {
      fail(intent, c10::str("ranks [0] did not come within ", to_seconds(patience_)));
    }
    first = store_->get_to_str(key);
  });
  return first;
}

std::string Meeting::attend(const std::string& intent, const std::string& complaint) {
  MeetingValue value;
  with_store(intent, [&] {
    value = join(intent, complaint);
    if (value.state == MeetingState::kOpen) value = await_end(key_of(sequence_));
  });
  if (value.state == MeetingState::kDone) {
    oldest_key_ = last_done_;
    last_done_ = sequence_;
  }
  ++sequence_;
  if (value.state == MeetingState::kFailed) fail(intent, value.text);
  if (value.state == MeetingState::kComplaint) return value.text;
  ++num_meetings_;
  return "";
}

void Meeting::with_store(const std::string& intent, const std::function<void()>& body) const {
  try {
    body();
  } catch (const c10::DistStoreError& error) {
    fail(intent, c10::str("the store of the group failed (", error.what_without_backtrace(), ")"));
  } catch (const c10::DistNetworkError& error) {
    fail(intent, c10::str("the store of the group is gone (", error.what_without_backtrace(), ")"));
  }
}

MeetingValue Meeting::join(const std::string& intent, const std::string& complaint) {
  MeetingValue current;
  while (true) {
    const std::string key = key_of(sequence_);
    if (current.state == MeetingState::kComplaint) return current;
    if (current.state == MeetingState::kFailed) {  // it failed without this rank
      ++sequence_;
      current = {};
      continue;
    }
    MeetingValue next{MeetingState::kOpen, current.ranks, intent};
    next.ranks.push_back(rank_);
    if (static_cast<int>(next.ranks.size()) == size_) next.state = MeetingState::kDone;
    if (!complaint.empty()) next = {MeetingState::kComplaint, current.ranks, complaint};
    const bool mismatch = current.state == MeetingState::kOpen && subject_of(current.text) != subject_of(intent);
    if (mismatch) next = failed(current, c10::str("rank ", rank_, " came to ", sentence_of(intent)));
    if (!swap_value(*store_, key, current, next)) continue;
    if (next.state != MeetingState::kOpen) end(key);
    if (current.state == MeetingState::kAbsent) forget_earlier();  // this rank has to wait anyway
    if (mismatch) {  // what the others read in the store names this rank; this rank names the others
      next.text = c10::str("ranks [", c10::Join(", ", current.ranks), "] wait to ", sentence_of(current.text));
    }
    return next;
  }
}

MeetingValue Meeting::await_end(const std::string& key) {
  MeetingValue current;
  try {
    store_->wait({key + kEndSuffix}, patience_);
    return MeetingValue::parse(store_->get_to_str(key));
  } catch (const c10::DistStoreError&) {
    current = MeetingValue::parse(store_->get_to_str(key));
  }
  while (current.state == MeetingState::kOpen) {
    const auto next = failed(current, c10::str("ranks [", c10::Join(", ", current.missing(size_)),
                                               "] did not come within ", to_seconds(patience_)));
    if (!swap_value(*store_, key, current, next)) continue;
    end(key);
    return next;
  }
  return current;
}

void Meeting::end(const std::string& key) { store_->set(key + kEndSuffix, "1"); }

// All ranks joined the last meeting that was complete, so nobody reads an earlier one any more.
void Meeting::forget_earlier() {
  for (; oldest_key_ < last_done_; ++oldest_key_) {
    store_->deleteKey(key_of(oldest_key_));
    store_->deleteKey(key_of(oldest_key_) + kEndSuffix);
  }
}

void Meeting::fail(const std::string& intent, const std::string& reason) const {
  C10_THROW_ERROR(DistError,
                  c10::str("rank ", rank_, " ", third_person(intent), ", but ", reason, ": ", meeting_advice(intent)));
}

std::string Meeting::key_of(int64_t sequence) const { return std::to_string(sequence); }

}  // namespace fsdp::comm
