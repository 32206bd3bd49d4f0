#pragma once
// Training on unequal numbers of batches: ranks that ran out go on with weight zero until the last rank is done.
//
//   fsdp::Join join(mesh);
//   auto batch = loader.first();
//   for (bool has_batch = true; join.next(has_batch);) {
//     auto loss = model->forward(batch).mean();          // without a batch: of the last one again
//     (loss * join.weight()).backward();                 // weight 0 then
//     optimizer.step();
//     optimizer.zero_grad();
//     has_batch = loader.next(batch);
//   }
//
// The collectives of a sharded model need every rank in every iteration. So a rank without data runs the model too, on
// any batch of which the loss is finite, and its gradients count for nothing. PyTorch:
// torch.distributed.algorithms.join.Join, which shadows collectives instead; that needs to know them beforehand.
#include <fsdp/device_mesh.h>

namespace fsdp {

struct JoinOptions {
  // false: gradients are the mean over the ranks that have data. true: over all ranks, so late batches weigh less.
  bool divide_by_initial_world_size = false;
  // Raise on every rank as soon as some ranks have data and others do not.
  bool throw_on_early_termination = false;
};

class Join {
 public:
  // `mesh`: that of fully_shard. Errors: c10::ValueError when it is undefined.
  explicit Join(DeviceMesh mesh, const JoinOptions& options = {});

  // Begins an iteration: false when no rank has data. Collective: one all-reduce of one number a mesh dim.
  // Errors: c10::Error after it returned false, or as options.throw_on_early_termination says; c10::DistError when
  // ranks do not come.
  [[nodiscard]] bool next(bool has_data);

  // Of the current iteration. What to multiply this rank's mean loss by, so that the gradients that fully_shard
  // averages are the mean over the ranks with data: 0 without data, otherwise ranks / ranks with data (1 with
  // divide_by_initial_world_size).
  [[nodiscard]] double weight() const { return weight_; }
  [[nodiscard]] int64_t num_ranks_with_data() const { return num_ranks_with_data_; }

 private:
  DeviceMesh mesh_;
  JoinOptions options_;
  bool ended_ = false;
  double weight_ = 0.0;
  int64_t num_ranks_with_data_ = 0;
};

}  // namespace fsdp
