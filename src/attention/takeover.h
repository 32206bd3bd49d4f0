#pragma once
// While a Takeover lives, scaled_dot_product_attention on this thread and in what autograd runs for it goes to an
// attention scheme.
//
// A dispatch key of its own, above autocast and autograd, has a kernel for that one operator and lets every other one
// fall through at no cost. The key is switched on in thread-local state, as autocast is, so neither other threads nor
// other scopes notice.
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fsdp/context_parallel.h>

#include "mesh/sequence_scope.h"

namespace fsdp::attention {

// What the kernel finds.
class ActiveScheme : public mesh::SequenceScope {
 public:
  // `buffers`: what the scope splits.
  ActiveScheme(const DeviceMesh& mesh, const ContextParallelOptions& options, std::vector<at::Tensor> buffers,
               std::optional<int64_t> sequence_length);

  // q [B, H, S_local, D], k and v [B, H_kv, S_local, D].
  [[nodiscard]] at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double dropout_p,
                                  bool is_causal, std::optional<double> scale, bool enable_gqa);
  [[nodiscard]] SequenceSplit split() const { return split_; }
  [[nodiscard]] std::optional<int64_t> sequence_length() const { return sequence_length_; }
  [[nodiscard]] const DeviceMesh& device_mesh() const { return mesh_; }
  [[nodiscard]] bool was_used() const { return was_used_; }

 private:
  void check_length(const char* name, const at::Tensor& tensor) const;

  DeviceMesh mesh_;
  ContextParallelMethod method_;
  SequenceSplit split_;
  RingRotation rotation_;
  std::optional<int64_t> sequence_length_;
  bool was_used_ = false;
};

class Takeover {
 public:
  explicit Takeover(const std::shared_ptr<ActiveScheme>& scheme);

 private:
  c10::DebugInfoGuard info_;
  c10::impl::IncludeDispatchKeyGuard key_;
};

}  // namespace fsdp::attention
