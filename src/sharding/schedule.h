#pragma once
// Learns in which order groups are gathered, and predicts the next one from the last iteration.
//
// An iteration is a sequence of passes: forward passes (training or evaluation; a new one starts when the first group
// of the pass is touched again) and backward passes. Pass k of a kind is predicted from pass k of the iteration before.
// The prediction depends on the sequence of ops alone, so it is the same on every rank: a predicted gather needs no
// meeting.
#include <map>
#include <optional>
#include <vector>

namespace fsdp::sharding {

class Schedule {
 public:
  enum class Kind { kForward, kBackward };

  // A pass of `kind` begins. A forward pass after a backward one begins a new iteration.
  void begin_pass(Kind kind, bool predict_from_last_pass = false);
  // Group `id` is used, gathered or not; recognises the start of another forward pass. Without gradients a pass is an
  // iteration by itself, so the next one may be predicted from it at once.
  void touched(int id, bool with_grad);
  // Forgets the pass that runs: it did not come to its end.
  void abandon_pass();
  // Whether touched(id) begins another forward pass.
  [[nodiscard]] bool starts_pass(int id) const { return key_.kind == Kind::kForward && id == first_touched_; }
  // Group `id` was not resident and is gathered now.
  void gathered(int id);
  // The group that was gathered next last time, if any.
  [[nodiscard]] std::optional<int> next() const;
  // Whether gathering `id` now was predicted.
  [[nodiscard]] bool expects(int id) const { return next() == id; }

 private:
  struct Key {
    Kind kind = Kind::kForward;
    int index = 0;
    auto operator<=>(const Key&) const = default;
  };
  std::map<Key, std::vector<int>> learnt_;
  Key key_;
  std::vector<int> order_;  // of this pass
  size_t cursor_ = 0;       // in learnt_[key_]
  int first_touched_ = -1;  // in this pass
  int last_touched_ = -1;
  int num_backward_ = 0;  // in this iteration
  bool started_ = false;
};

}  // namespace fsdp::sharding
