#pragma once
// What the key of a meeting holds.
#include <string>
#include <vector>

namespace fsdp::comm {

struct MeetingValue {
  enum class State { kAbsent, kOpen, kDone, kFailed, kComplaint };
  State state = State::kAbsent;
  std::vector<int> ranks;  // that joined
  std::string text;        // the intent while open or done, else the reason

  // "open\n0,2\nread X as a full tensor"; "" when absent
  [[nodiscard]] std::string to_string() const;
  [[nodiscard]] static MeetingValue parse(const std::string& text);

  [[nodiscard]] std::vector<int> missing(int size) const;  // ranks that did not join
};

}  // namespace fsdp::comm
