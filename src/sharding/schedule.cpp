#include "sharding/schedule.h"

#include <algorithm>

namespace fsdp::sharding {

namespace {
// Later passes of one kind share what was learnt.
constexpr int kMaxPasses = 256;
}  // namespace

void Schedule::begin_pass(Kind kind, bool predict_from_last_pass) {
  const bool new_iteration = kind == Kind::kForward && (!started_ || key_.kind == Kind::kBackward);
  auto finished = std::move(order_);
  // A backward that gathered nothing (all was there) predicts none; a forward like that tells nothing.
  if (!finished.empty() || (key_.kind == Kind::kBackward && first_touched_ >= 0)) learnt_[key_] = finished;
  if (kind == Kind::kBackward) {
    key_ = {kind, std::min(num_backward_++, kMaxPasses - 1)};
  } else if (new_iteration) {
    key_ = {kind, 0};
    num_backward_ = 0;
  } else {
    key_ = {kind, std::min(key_.index + 1, kMaxPasses - 1)};
    if (predict_from_last_pass && !learnt_.contains(key_) && !finished.empty()) learnt_[key_] = std::move(finished);
  }
  order_.clear();
  cursor_ = 0;
  first_touched_ = last_touched_ = -1;
  started_ = true;
}

void Schedule::abandon_pass() {
  order_.clear();
  cursor_ = 0;
  first_touched_ = last_touched_ = -1;
}

void Schedule::touched(int id, bool with_grad) {
  if (id == last_touched_) return;
  if (starts_pass(id)) begin_pass(Kind::kForward, !with_grad);
  if (first_touched_ < 0) first_touched_ = id;
  last_touched_ = id;
}

std::optional<int> Schedule::next() const {
  const auto found = learnt_.find(key_);
  if (found == learnt_.end() || cursor_ >= found->second.size()) return std::nullopt;
  return found->second[cursor_];
}

void Schedule::gathered(int id) {
  order_.push_back(id);
  const auto found = learnt_.find(key_);
  if (found == learnt_.end()) return;
  const auto& last = found->second;
  const auto from = last.begin() + static_cast<std::ptrdiff_t>(std::min(cursor_, last.size()));
  const auto place = std::find(from, last.end(), id);  // resynchronises after a deviation
  if (place != last.end()) cursor_ = static_cast<size_t>(place - last.begin()) + 1;
}

}  // namespace fsdp::sharding
