#pragma once
// A backend that counts collectives and hands them to gloo.
#include <fsdp/process_group.h>

#include <atomic>
#include <mutex>
#include <set>
#include <vector>

#include "support/parity.h"

namespace fsdp::testing {

class CountingBackend : public c10d::Backend {
 public:
  explicit CountingBackend(c10::intrusive_ptr<c10d::Backend> inner)
      : c10d::Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  [[nodiscard]] int num_all_reduces() const { return num_all_reduces_; }
  [[nodiscard]] int num_all_gathers() const { return num_all_gathers_; }
  [[nodiscard]] int num_reduce_scatters() const { return num_reduce_scatters_; }
  [[nodiscard]] int num_all_to_alls() const { return num_all_to_alls_; }
  struct AllReduce {
    int64_t numel;
    at::ScalarType dtype;
    bool operator==(const AllReduce&) const = default;
  };
  [[nodiscard]] std::vector<AllReduce> all_reduces() const;  // in the order in which they started
  [[nodiscard]] int num_collectives() const {
    return num_all_reduces_ + num_all_gathers_ + num_reduce_scatters_ + num_all_to_alls_ + num_others_;
  }
  // Of all reductions so far.
  [[nodiscard]] std::set<c10d::ReduceOp::RedOpType> reduce_ops() const;
  [[nodiscard]] std::set<at::ScalarType> reduce_dtypes() const;

  using Work = c10::intrusive_ptr<c10d::Work>;
  const std::string getBackendName() const override { return "counting"; }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }
  Work broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override;
  Work allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override;
  Work allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                 const c10d::AllgatherOptions& options) override;
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  Work scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
               const c10d::ScatterOptions& options) override;
  Work reduce_scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                      const c10d::ReduceScatterOptions& options) override;
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                     std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  Work barrier(const c10d::BarrierOptions& options) override;

 private:
  void note(const at::Tensor& tensor, const c10d::ReduceOp& op);

  c10::intrusive_ptr<c10d::Backend> inner_;
  mutable std::mutex mutex_;
  std::set<c10d::ReduceOp::RedOpType> reduce_ops_;
  std::set<at::ScalarType> reduce_dtypes_;
  std::vector<AllReduce> all_reduces_;
  std::atomic<int> num_all_reduces_ = 0, num_all_gathers_ = 0, num_reduce_scatters_ = 0, num_all_to_alls_ = 0,
                   num_others_ = 0;
};

// A group over `store` whose collectives are counted.
[[nodiscard]] ProcessGroup make_counting_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size);
[[nodiscard]] CountingBackend& counts_of(const ProcessGroup& group);
// The same ranks over such a group.
[[nodiscard]] RankContext on_counting_group(const RankContext& rank);
// Makes "counting" known to process groups.
void register_counting_backend();

}  // namespace fsdp::testing
