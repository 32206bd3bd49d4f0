#pragma once
// Says to other layers that, on this thread and in what autograd runs for it, tokens are split over some ranks.
//
// Kept in LibTorch's ThreadLocalDebugInfo, which backward threads inherit, and which activation checkpointing replays.
#include <ATen/core/Tensor.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fsdp::mesh {

class SequenceScope : public c10::DebugInfoBase {
 public:
  SequenceScope(std::vector<int64_t> ranks, std::vector<at::Tensor> buffers)
      : ranks_(std::move(ranks)), buffers_(std::move(buffers)) {}
  // Global ranks that share one sequence, this rank among them.
  [[nodiscard]] const std::vector<int64_t>& ranks() const { return ranks_; }

  static constexpr std::string_view kName = "fsdp context_parallel";
  [[nodiscard]] static c10::DebugInfoKind kind() { return c10::DebugInfoKind(&kName); }
  // The innermost one; null outside of any.
  [[nodiscard]] static SequenceScope* active() {
    return static_cast<SequenceScope*>(c10::ThreadLocalDebugInfo::get(kind()));
  }
  // Whether `tensor` holds only this rank's part until the innermost scope ends, other tokens than on other ranks.
  [[nodiscard]] static bool splits(const at::Tensor& tensor) {
    const auto* scope = active();
    return scope && std::any_of(scope->buffers_.begin(), scope->buffers_.end(),
                                [&](const auto& buffer) { return buffer.is_same(tensor); });
  }

 private:
  std::vector<int64_t> ranks_;
  std::vector<at::Tensor> buffers_;
};

// For an `action` that needs whole tensors. Errors: c10::Error for one that a scope splits.
inline void check_not_split(const at::Tensor& tensor, const std::string& name, const std::string& action) {
  TORCH_CHECK(!SequenceScope::splits(tensor), action, ": buffer '", name,
              "' holds only this rank's part of it inside context_parallel. Hint: let the scope end first");
}

}  // namespace fsdp::mesh
