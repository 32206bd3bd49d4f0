#pragma once
// Replaces the sharded arguments of one op by gathered tensors, in two phases: first every owner is collected and
// gathered together, so that resolving one argument never frees another; then the tensors are substituted.
#include <c10/util/SmallVector.h>

#include "dtensor/lone_copy.h"
#include "dtensor/owner.h"
#include "dtensor/shard_state.h"

namespace fsdp::dtensor {

class Resolver {
 public:
  // kCompute: what mixed precision gathers, in its dtype. kMaster: the values of the shards themselves; a view of them
  // that meets an activation is cast then. kExact: the same, and stays in the shards' dtype.
  enum class Mode { kCompute, kMaster, kExact };
  explicit Resolver(const char* op, Mode mode = Mode::kCompute) : op_(op), mode_(mode) {}

  void see(const at::Tensor& tensor);                                // phase 1, for every tensor argument
  void gather();                                                     // ends phase 1
  [[nodiscard]] at::Tensor resolve(const at::Tensor& tensor) const;  // phase 2
  // The dtype that activations are cast to, when a parameter takes part that was lowered for compute.
  [[nodiscard]] std::optional<at::ScalarType> cast_dtype() const { return cast_dtype_; }
  // After the op wrote to `tensor` (as given to see()): the shard follows.
  void write_back(const at::Tensor& tensor) const;

 private:
  [[nodiscard]] Owner* lone_owner(const ShardState* state) const;

  void note_precision(const Owner& owner, int index);

  const char* op_;
  Mode mode_;
  std::optional<at::ScalarType> cast_dtype_;
  const std::string* path_ = nullptr;
  c10::SmallVector<Owner*, 4> owners_;
  c10::SmallVector<ShardState*, 4> partials_;
  c10::SmallVector<std::shared_ptr<LoneCopy>, 2> lone_;
};

// Mixed precision: `tensor` in the dtype of the parameter it meets, as part of the graph. Integers and single numbers
// stay: they do not decide the result's dtype.
[[nodiscard]] at::Tensor follow_dtype(const at::Tensor& tensor, at::ScalarType dtype);

// Errors: c10::NotImplementedError for a view of a copy that was lowered for compute: its shards would be rounded.
void check_not_lowered(const at::Tensor& tensor);

// The error of plain LibTorch for an in-place write to a leaf that requires grad, also through a view.
void check_writable(const at::Tensor& tensor);

}  // namespace fsdp::dtensor
