#pragma once
// Says to the layers below that, on this thread and in what autograd runs for it, tokens are split over some ranks.
//
// Kept in LibTorch's ThreadLocalDebugInfo, which backward threads inherit, and which activation checkpointing replays.
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace fsdp::mesh {

class SequenceScope : public c10::DebugInfoBase {
 public:
  explicit SequenceScope(std::vector<int64_t> ranks) : ranks_(std::move(ranks)) {}
  // Global ranks that share one sequence, this rank among them.
  [[nodiscard]] const std::vector<int64_t>& ranks() const { return ranks_; }

  static constexpr std::string_view kName = "fsdp context_parallel";
  [[nodiscard]] static c10::DebugInfoKind kind() { return c10::DebugInfoKind(&kName); }
  // The innermost one; null outside of any.
  [[nodiscard]] static SequenceScope* active() {
    return static_cast<SequenceScope*>(c10::ThreadLocalDebugInfo::get(kind()));
  }

 private:
  std::vector<int64_t> ranks_;
};

}  // namespace fsdp::mesh
