#pragma once
// Decides which groups of one root are gathered at any time: gathers on demand, starts the next gather early, and frees
// what is behind. One object for each root, guarded by one mutex; nothing here is global or thread-local.
#include <mutex>

#include "dtensor/owner.h"
#include "sharding/block_pool.h"
#include "sharding/module_state.h"
#include "sharding/param_group.h"
#include "sharding/pending_reduction.h"
#include "sharding/schedule.h"
#include "sharding/unshard_node.h"

namespace fsdp::sharding {

class Runtime : public dtensor::Scheduler, public std::enable_shared_from_this<Runtime> {
 public:
  explicit Runtime(c10::Device device);

  // Makes all `owners` (groups of this root) gathered. A gather that the last iteration did not predict first meets the
  // other ranks in the store.
  void touch(c10::ArrayRef<dtensor::Owner*> owners, const dtensor::Reason& reason) override;
  torch::autograd::variable_list run_backward(ParamGroup& group, const UnshardNode& node,
                                              torch::autograd::variable_list grads);
  void hold(ParamGroup& group);     // FSDPModule::unshard: gathered until released or the end of backward
  void release(ParamGroup& group);  // FSDPModule::reshard

  void add_group(const std::shared_ptr<ParamGroup>& group);
  void add_module(const std::shared_ptr<ModuleState>& module);
  void absorb(Runtime& inner);  // an outer fully_shard joins the roots below it
  [[nodiscard]] const std::vector<std::shared_ptr<ModuleState>>& modules() const { return modules_; }
  [[nodiscard]] std::shared_ptr<ModuleState> find_module(const torch::nn::Module* address) const;

  [[nodiscard]] const std::shared_ptr<dtensor::Ledger>& ledger() const { return ledger_; }
  [[nodiscard]] const std::shared_ptr<BlockPool>& pool() const { return pool_; }
  // At most one reduction flies while the next group computes: waits for older ones.
  void make_room_for_reduction();
  void track(const std::shared_ptr<PendingReduction>& reduction);

 private:
  [[nodiscard]] std::shared_ptr<ParamGroup> group(int id) const { return groups_[id].lock(); }
  void enter_pass();
  void end_backward();
  void gather(ParamGroup& group, c10::ArrayRef<dtensor::Owner*> owners, const dtensor::Reason& reason);
  void meet_if_unexpected(ParamGroup& group, const dtensor::Reason& reason);
  void evict(c10::ArrayRef<dtensor::Owner*> owners);
  [[nodiscard]] bool may_evict(const ParamGroup& group, c10::ArrayRef<dtensor::Owner*> owners) const;
  void prefetch();
  void expect_reduction(const ParamGroup& group, const UnshardNode& node);
  [[nodiscard]] bool is_held(const ParamGroup& group) const;

  std::recursive_mutex mutex_;
  std::shared_ptr<dtensor::Ledger> ledger_;
  std::shared_ptr<BlockPool> pool_;
  std::vector<std::weak_ptr<ParamGroup>> groups_;  // by id
  std::vector<std::shared_ptr<ModuleState>> modules_;
  Schedule schedule_;
  Schedule reduction_order_;         // of backward passes: what is reduced after what
  int current_ = -1;                 // the group gathered last; it stays while the next one is used
  std::vector<int> held_;            // ids
  std::vector<int> backward_tasks_;  // ids of the graph tasks that run, outermost first
  bool in_forward_ = false;
  std::vector<std::shared_ptr<PendingReduction>> reductions_;  // oldest first
};

}  // namespace fsdp::sharding
