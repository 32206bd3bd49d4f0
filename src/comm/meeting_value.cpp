#include "comm/meeting_value.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <sstream>
#include <utility>

namespace fsdp::comm {
namespace {

constexpr std::array<std::pair<MeetingValue::State, const char*>, 4> kStateNames{
    {{MeetingValue::State::kOpen, "open"},
     {MeetingValue::State::kDone, "done"},
     {MeetingValue::State::kFailed, "failed"},
     {MeetingValue::State::kComplaint, "complaint"}}};

}  // namespace

std::string MeetingValue::to_string() const {
  for (const auto& [candidate, name] : kStateNames) {
    if (candidate == state) return c10::str(name, "\n", c10::Join(",", ranks), "\n", text);
  }
  return "";
}

MeetingValue MeetingValue::parse(const std::string& text) {
  MeetingValue value;
  if (text.empty()) return value;
  std::istringstream in(text);
  std::string state_name;
  std::string ranks;
  std::getline(in, state_name);
  std::getline(in, ranks);
  const auto known = std::find_if(kStateNames.begin(), kStateNames.end(),
                                  [&](const auto& entry) { return state_name == entry.second; });
  TORCH_CHECK(known != kStateNames.end() && in, "the store holds an unreadable meeting: ", text);
  value.state = known->first;
  std::istringstream rank_list(ranks);
  for (std::string rank; std::getline(rank_list, rank, ',');) value.ranks.push_back(std::stoi(rank));
  value.text.assign(std::istreambuf_iterator<char>(in), {});
  return value;
}

std::vector<int> MeetingValue::missing(int size) const {
  std::vector<int> absent;
  for (int rank = 0; rank < size; ++rank) {
    if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) absent.push_back(rank);
  }
  return absent;
}

}  // namespace fsdp::comm
