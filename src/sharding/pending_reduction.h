#pragma once
// One reduce-scatter in flight, of the gradients of one dtype of a group.
#include "comm/collectives.h"
#include "dtensor/shard_state.h"
#include "sharding/block_pool.h"

namespace fsdp::sharding {

// Gradients are averaged over all ranks: reduce-scatter over the shard group, then all-reduce over the replicas.
struct ReductionPlan {
  ProcessGroup shard_group;
  ProcessGroup replicate_group;    // null without replicas
  std::string name;                // for messages
  std::vector<std::string> paths;  // one a parameter
  std::vector<bool> had_gradient;  // on this rank, one a parameter
  [[nodiscard]] int64_t num_ranks() const {
    return shard_group->getSize() * (replicate_group ? replicate_group->getSize() : 1);
  }
};

class PendingReduction : public dtensor::Pending {
 public:
  // `input` [num shard ranks * n], `output` [n]; the last paths.size() elements of each row are the flags that tell
  // which parameters had a gradient.
  PendingReduction(ReductionPlan plan, Block input, const at::Tensor& input_view, at::Tensor output);
  void wait() override;

 private:
  void finish();
  void check_flags() const;

  ReductionPlan plan_;
  Block input_;
  at::Tensor output_;
  comm::PendingCollective work_;
  bool done_ = false;
  std::exception_ptr error_;
};

}  // namespace fsdp::sharding
