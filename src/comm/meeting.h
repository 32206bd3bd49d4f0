#pragma once
// All ranks of a group agree in the store that they are about to do the same thing.
//
//   comm::meeting_of(group)->meet("aten::norm of layers.0.weight");   // then the collective is safe to start
//
// Protocol: meeting number n lives in one key, changed by compare-and-set only:
//   open    what, ranks that joined   -> more ranks join
//   done    complete                  -> every rank goes on; the next meeting is n + 1
//   failed  a reason                  -> all who had joined raise it; who had not moves on to meeting n + 1
// The rank that ends a meeting also sets a second key, on which the others sleep. Because a meeting ends once and for
// all, a rank that gives up and a rank that arrives at that moment always see the same outcome.
#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace fsdp::comm {

struct MeetingValue;

// Thread-safe, but two threads of a rank that meet in one group at once take turns in no particular order.
class Meeting {
 public:
  // A rank waits for the others at most half of `timeout`, so that it gives up before the collectives of the others do.
  Meeting(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout);

  // Returns when every rank of the group called meet() with the same `what`; at once for a group of one.
  // Errors: c10::DistError naming this rank, `what` and the ranks that did not come or wanted something else.
  // With `subject` that alone must agree: two parameters of one group may be read at once, as both want the group.
  void meet(const std::string& what, const std::string& subject = "");
  // The same for anything but a read; `intent` starts with an infinitive: "reduce the gradients of layers.0".
  void meet_to(const std::string& intent);

  // Every rank calls it with its own `record`; ranks other than 0 call `compare` with rank 0's, which returns a
  // complaint or "". Returns one of the complaints on every rank, or "" when there is none. Errors: as meet().
  [[nodiscard]] std::string compare_with_rank0(const std::string& topic, const std::string& record,
                                               const std::function<std::string(const std::string&)>& compare);

  // Meetings that succeeded so far, both kinds together.
  [[nodiscard]] int64_t num_meetings() const;

 private:
  // `intent` starts with an infinitive: "read X as a full tensor"; a second line is the subject. Returns the complaint
  // that ended the meeting, or "".
  std::string attend(const std::string& intent, const std::string& complaint = "");
  MeetingValue join(const std::string& intent, const std::string& complaint);
  MeetingValue await_end(const std::string& key);
  void end(const std::string& key);
  void forget_earlier();
  std::string share_from_rank0(const std::string& intent, const std::string& key, const std::string& record);
  // Turns a failing store into fail().
  void with_store(const std::string& intent, const std::function<void()>& body) const;
  [[noreturn]] void fail(const std::string& intent, const std::string& reason) const;
  [[nodiscard]] std::string key_of(int64_t sequence) const;

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  int size_;
  std::chrono::milliseconds patience_;
  mutable std::mutex mutex_;
  int64_t sequence_ = 0;    // of the next meeting
  int64_t last_done_ = 0;   // the last one that was complete
  int64_t oldest_key_ = 0;  // meetings before it are gone from the store
  int64_t num_meetings_ = 0;
};

}  // namespace fsdp::comm
