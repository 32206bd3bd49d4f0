#pragma once
// How a bucket of gradients is all-reduced: as one of this library's collectives, whose failure says who, what and why.
#include <fsdp/process_group.h>

#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <unordered_map>

namespace fsdp::parallel {

class BucketHook : public c10d::CommHookInterface {
 public:
  using Paths = std::unordered_map<const c10::TensorImpl*, std::string>;
  BucketHook(ProcessGroup group, Paths paths)
      : group_(std::move(group)), paths_(std::move(paths)), divisor_(group_->getSize()) {}

  // Of the sum of all ranks, from the next backward on; their number until then.
  void set_divisor(int64_t divisor) { divisor_ = divisor; }

  // Divides the bucket and starts its all-reduce. The future is complete at once; its value is waited for by
  // parseHookResult(), which the reducer calls for each bucket at the end of backward.
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override;
  // The bucket, reduced. Errors: c10::DistError.
  at::Tensor parseHookResult(const c10::IValue& result) override;

 private:
  [[nodiscard]] std::string describe(const c10d::GradBucket& bucket) const;

  ProcessGroup group_;
  Paths paths_;
  int64_t divisor_;
};

}  // namespace fsdp::parallel
