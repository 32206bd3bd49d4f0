#include <fsdp/join.h>

#include "mesh/reduce_numbers.h"

namespace fsdp {

Join::Join(DeviceMesh mesh, const JoinOptions& options) : mesh_(std::move(mesh)), options_(options) {
  TORCH_CHECK_VALUE(mesh_.defined(), "Join: the mesh is undefined; pass the one that fully_shard was given");
}

bool Join::next(bool has_data) {
  TORCH_CHECK(!ended_, "Join::next() was called after it returned false; make a new Join for another epoch");
  const auto sums =
      reduce_numbers({has_data ? 1.0 : 0.0}, mesh_, "count the ranks that have data (Join)", c10d::ReduceOp::SUM);
  num_ranks_with_data_ = static_cast<int64_t>(sums[0]);
  ended_ = num_ranks_with_data_ == 0;
  const bool is_uneven = !ended_ && num_ranks_with_data_ < mesh_.size();
  TORCH_CHECK(!(is_uneven && options_.throw_on_early_termination), "Join: ", mesh_.size() - num_ranks_with_data_,
              " of ", mesh_.size(), " ranks ran out of data, among them ", has_data ? "not " : "", "this one");
  weight_ = has_data ? 1.0 : 0.0;
  if (has_data && !options_.divide_by_initial_world_size) weight_ = static_cast<double>(mesh_.size()) / sums[0];
  return !ended_;
}

}  // namespace fsdp
