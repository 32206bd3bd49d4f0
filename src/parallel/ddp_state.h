#pragma once
// What a DistributedDataParallel does around each forward: buffers, buckets, and steps of ranks without data.
#include <fsdp/distributed_data_parallel.h>

#include "parallel/bucket_reducer.h"

namespace fsdp::parallel {

class DdpState {
 public:
  // Checks everything, on all ranks together, before anything is changed. `module` outlives this.
  DdpState(torch::nn::Module& module, const DistributedDataParallelOptions& options);

  void before_forward();
  void after_forward(std::vector<at::Tensor>& outputs);
  // Whether after_forward() has to be given all tensors of the output.
  [[nodiscard]] bool needs_outputs() const { return syncs_ && reducer_->needs_outputs(); }

  bool set_requires_sync(bool requires_sync) { return std::exchange(requires_sync_, requires_sync); }
  void join(const std::function<void()>& loop, const JoinOptions& options);

  [[nodiscard]] const DistributedDataParallelOptions& options() const { return options_; }

 private:
  // Of one step with join(), agreed by all ranks.
  struct Step {
    bool syncs = false;  // gradients are averaged
    int authority = 0;   // the rank whose buffers count
  };
  [[nodiscard]] Step agree_on_step(bool has_data, bool syncs) const;
  void shadow_step();
  void check_frozen() const;
  void broadcast_buffers(int root);
  void broadcast_model(int root);
  void broadcast(const std::vector<at::Tensor>& tensors, int root, const std::string& what) const;

  torch::nn::Module& module_;
  DistributedDataParallelOptions options_;
  ProcessGroup group_;
  std::vector<ReducedTensor> frozen_;
  std::string sparse_path_;  // of a parameter with a sparse gradient; empty: there is none
  std::unique_ptr<BucketReducer> reducer_;
  std::optional<Join> join_;
  bool requires_sync_ = true;
  bool syncs_ = false;       // the forward that runs, or ran last
  bool buffers_due_ = true;  // they may differ since the last broadcast
};

}  // namespace fsdp::parallel
