#pragma once
// The gathered copy of a sharded tensor that belongs to no parameter group: a gradient, an optimizer state, the result
// of distribute_tensor. Lives as long as a view of it does.
#include "dtensor/owner.h"
#include "dtensor/shard_state.h"

namespace fsdp::dtensor {

class LoneCopy : public Owner, public Scheduler, public std::enable_shared_from_this<LoneCopy> {
 public:
  // `is_exact`: never cast for compute.
  LoneCopy(std::shared_ptr<ShardState> state, at::IntArrayRef sizes, bool is_exact)
      : state_(std::move(state)), sizes_(sizes.vec()), is_exact_(is_exact) {}

  [[nodiscard]] const ShardState* state() const { return state_.get(); }

  Scheduler& scheduler() override { return *this; }
  void touch(c10::ArrayRef<Owner*> owners, const Reason& reason) override;
  at::Tensor gathered(int index, const at::Tensor& handle) override;
  void write_back(int index) override;
  void replaced(int index) override;
  const std::string& path(int) const override { return state_->path; }
  Precision precision(int) const override;

 private:
  std::shared_ptr<ShardState> state_;
  std::vector<int64_t> sizes_;
  bool is_exact_;
  at::Tensor full_;  // plain; the storage below shares its bytes
  c10::weak_intrusive_ptr<GatheredStorage> storage_{c10::intrusive_ptr<GatheredStorage>()};
  uint32_t version_ = 0;  // of the shard when it was gathered
};

}  // namespace fsdp::dtensor
