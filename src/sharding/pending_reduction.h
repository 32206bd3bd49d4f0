#pragma once
// One reduction in flight, of the gradients of one dtype of a group.
#include <functional>

#include "comm/collectives.h"
#include "comm/fingerprint.h"
#include "dtensor/shard_state.h"
#include "sharding/block_pool.h"

namespace fsdp::sharding {

// One parameter's place in a reduction.
struct ReducedParameter {
  std::string path;
  int64_t offset = 0;  // elements, in the row of each rank
  int64_t numel = 0;   // of this rank's shard, without padding
  bool is_used = false;
  at::Tensor partial;  // what earlier backwards reduced over the shards only; may be undefined
  at::Tensor result;   // this rank's shard of the gradient, in the parameter's dtype
};

// Gradients are summed over all ranks, in one dtype (reduce-scatter over the shard group, all-reduce over the
// replicas), and then divided.
struct ReductionPlan {
  ProcessGroup shard_group;
  ProcessGroup replicate_group;  // null without replicas
  bool all_reduces = true;       // false: the sum stays over the shard group alone
  double divide_before = 1;
  double divide_after = 1;
  std::string name;  // for messages
  std::vector<ReducedParameter> parameters;
  std::function<void(const at::Tensor&)> hook;
  comm::Fingerprint fingerprint;
  int64_t gradient_numel = 0;  // of a row, before the tail

  // The tail of each row is made of pairs (x, 1 - x) that all ranks add up: both sums are positive only where ranks
  // differ, however coarse the dtype. One pair a parameter (used or not), and one a bit of the fingerprint.
  static constexpr int64_t kDigestBits = 16;
  [[nodiscard]] int64_t tail_numel() const { return 2 * (static_cast<int64_t>(parameters.size()) + kDigestBits); }
  [[nodiscard]] std::vector<float> tail() const;
};

class PendingReduction : public dtensor::Pending {
 public:
  // `input` [num shard ranks * n], `output` [n], both in the dtype of the reduction.
  PendingReduction(ReductionPlan plan, Block input, const at::Tensor& input_view, at::Tensor output);
  void wait() override;
  // This rank's shard of the gradient of parameter `i`, once wait() returned; undefined when it has none.
  [[nodiscard]] const at::Tensor& result(size_t i) const { return plan_.parameters[i].result; }
  [[nodiscard]] bool is_used(size_t i) const { return plan_.parameters[i].is_used; }
  // After wait(): this rank's part of the sums of parameter `i`.
  [[nodiscard]] at::Tensor sum(size_t i) const;

 private:
  // Whether there is more than one shard. Otherwise the sum over the shard group is this rank's own gradient.
  [[nodiscard]] bool has_shards() const { return plan_.shard_group->getSize() > 1; }
  void start_all_reduce();
  void finish();
  void check_tail() const;
  [[noreturn]] void fail_unequal_use(const ReducedParameter& parameter) const;

  ReductionPlan plan_;
  Block input_;
  at::Tensor output_;
  comm::PendingCollective work_;
  bool done_ = false;
  std::exception_ptr error_;
};

}  // namespace fsdp::sharding
