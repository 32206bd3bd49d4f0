#include "parallel/bucket_hook.h"

#include <torch/custom_class.h>

#include "comm/collectives.h"

namespace fsdp::parallel {
namespace {

struct PendingBucket : torch::CustomClassHolder {
  PendingBucket(at::Tensor gradients, comm::PendingCollective started)
      : buffer(std::move(gradients)), work(std::move(started)) {}
  at::Tensor buffer;
  comm::PendingCollective work;
};

// A sparse gradient has no memory that could be checked to be contiguous.
comm::PendingCollective all_reduce_sparse(const at::Tensor& gradient, const ProcessGroup& group,
                                          const std::string& what) {
  std::vector<at::Tensor> tensors{gradient};
  c10::intrusive_ptr<c10d::Work> work;
  comm::run_collectives(group, "all_reduce", what, [&] { work = group->allreduce(tensors); });
  return {work, group, "all_reduce", what};
}

}  // namespace

c10::intrusive_ptr<c10::ivalue::Future> BucketHook::runHook(c10d::GradBucket& bucket) {
  auto& buffer = bucket.getBufferRef();
  const auto what = describe(bucket);
  if (divisor_ > 1) buffer.div_(divisor_);
  auto work = buffer.is_sparse() ? all_reduce_sparse(buffer, group_, what)
                                 : std::move(comm::all_reduce({buffer}, group_, what).front());
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::AnyType::get());
  future->markCompleted(c10::IValue::make_capsule(c10::make_intrusive<PendingBucket>(buffer, std::move(work))));
  return future;
}

at::Tensor BucketHook::parseHookResult(const c10::IValue& result) {
  const auto pending = c10::static_intrusive_pointer_cast<PendingBucket>(result.toCapsule());
  pending->work.wait();
  return pending->buffer;
}

std::string BucketHook::describe(const c10d::GradBucket& bucket) const {
  const auto parameters = bucket.getParameters();
  const auto found = paths_.find(parameters.front().unsafeGetTensorImpl());
  const auto first = found == paths_.end() ? std::string("?") : found->second;
  const auto others = parameters.size() - 1;
  return c10::str("the gradients of ", first, others ? c10::str(" and ", others, " more") : "");
}

}  // namespace fsdp::parallel
