#include "support/counting_backend.h"

#include <mutex>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace fsdp::testing {

void CountingBackend::note(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const std::lock_guard lock(mutex_);
  reduce_ops_.insert(op);
  reduce_dtypes_.insert(tensor.scalar_type());
}

std::set<c10d::ReduceOp::RedOpType> CountingBackend::reduce_ops() const {
  const std::lock_guard lock(mutex_);
  return reduce_ops_;
}

std::set<at::ScalarType> CountingBackend::reduce_dtypes() const {
  const std::lock_guard lock(mutex_);
  return reduce_dtypes_;
}

CountingBackend::Work CountingBackend::broadcast(std::vector<at::Tensor>& tensors,
                                                 const c10d::BroadcastOptions& options) {
  ++num_others_;
  return inner_->broadcast(tensors, options);
}

std::vector<CountingBackend::AllReduce> CountingBackend::all_reduces() const {
  const std::lock_guard lock(mutex_);
  return all_reduces_;
}

CountingBackend::Work CountingBackend::allreduce(std::vector<at::Tensor>& tensors,
                                                 const c10d::AllreduceOptions& options) {
  ++num_all_reduces_;
  note(tensors.front(), options.reduceOp);
  {
    const std::lock_guard lock(mutex_);
    all_reduces_.push_back({tensors.front().numel(), tensors.front().scalar_type()});
  }
  return inner_->allreduce(tensors, options);
}

CountingBackend::Work CountingBackend::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                                 std::vector<at::Tensor>& inputs,
                                                 const c10d::AllgatherOptions& options) {
  ++num_all_gathers_;
  return inner_->allgather(outputs, inputs, options);
}

CountingBackend::Work CountingBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                       const c10d::AllgatherOptions& options) {
  ++num_all_gathers_;
  return inner_->_allgather_base(output, input, options);
}

CountingBackend::Work CountingBackend::scatter(std::vector<at::Tensor>& outputs,
                                               std::vector<std::vector<at::Tensor>>& inputs,
                                               const c10d::ScatterOptions& options) {
  ++num_others_;
  return inner_->scatter(outputs, inputs, options);
}

CountingBackend::Work CountingBackend::reduce_scatter(std::vector<at::Tensor>& outputs,
                                                      std::vector<std::vector<at::Tensor>>& inputs,
                                                      const c10d::ReduceScatterOptions& options) {
  ++num_reduce_scatters_;
  note(outputs.front(), options.reduceOp);
  return inner_->reduce_scatter(outputs, inputs, options);
}

CountingBackend::Work CountingBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                            const c10d::ReduceScatterOptions& options) {
  ++num_reduce_scatters_;
  note(output, options.reduceOp);
  return inner_->_reduce_scatter_base(output, input, options);
}

CountingBackend::Work CountingBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                     std::vector<int64_t>& output_splits,
                                                     std::vector<int64_t>& input_splits,
                                                     const c10d::AllToAllOptions& options) {
  ++num_all_to_alls_;
  return inner_->alltoall_base(output, input, output_splits, input_splits, options);
}

CountingBackend::Work CountingBackend::barrier(const c10d::BarrierOptions& options) {
  ++num_others_;
  return inner_->barrier(options);
}

void register_counting_backend() {
  static std::once_flag registered;
  std::call_once(registered, [] {
    register_backend("counting", {torch::kCPU}, [](const BackendContext& context) {
      const ProcessGroupOptions gloo{.backend = "gloo", .timeout = context.timeout};
      const auto store = c10::make_intrusive<c10d::PrefixStore>("inner", context.store);
      auto inner = make_process_group(store, context.rank, context.size, gloo);
      return c10::intrusive_ptr<c10d::Backend>(
          c10::make_intrusive<CountingBackend>(inner->getBackend(c10::DeviceType::CPU)));
    });
  });
}

ProcessGroup make_counting_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
  register_counting_backend();
  return make_process_group(store, rank, size, {.backend = "counting", .timeout = std::chrono::seconds(30)});
}

RankContext on_counting_group(const RankContext& rank) {
  RankContext counted = rank;
  counted.group = make_counting_group(rank.store, rank.rank(), rank.size());
  counted.mesh = DeviceMesh::from_group(counted.group, torch::kCPU, {"dp"});
  return counted;
}

CountingBackend& counts_of(const ProcessGroup& group) {
  return dynamic_cast<CountingBackend&>(*group->getBackend(c10::DeviceType::CPU));
}

}  // namespace fsdp::testing
