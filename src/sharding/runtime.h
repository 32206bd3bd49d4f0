#pragma once
// Decides which groups of one root are gathered at any time: gathers on demand, starts the next gather early, and frees
// what is behind. One object for each root, guarded by one mutex; nothing here is global or thread-local.
#include <mutex>

#include "dtensor/owner.h"
#include "sharding/block_pool.h"
#include "sharding/module_state.h"
#include "sharding/param_group.h"
#include "sharding/schedule.h"

namespace fsdp::sharding {

class Runtime : public dtensor::Scheduler, public std::enable_shared_from_this<Runtime> {
 public:
  explicit Runtime(c10::Device device);

  // Makes all `owners` (groups of this root) gathered. A gather that the last iteration did not predict first meets the
  // other ranks in the store.
  void touch(c10::ArrayRef<dtensor::Owner*> owners, const dtensor::Reason& reason) override;
  torch::autograd::variable_list run_backward(ParamGroup& group, const UnshardNode& node,
                                              torch::autograd::variable_list grads);
  // The same for a whole gradient of one parameter that did not come through a node.
  at::Tensor reduce_whole(ParamGroup& group, int index, const at::Tensor& grad);
  // FSDPModule::unshard: gathered until it was used, released, or backward ended. With `async_op` only started.
  void hold(ParamGroup& group, bool async_op);
  void finish(ParamGroup& group);   // waits for hold(group, true)
  void release(ParamGroup& group);  // FSDPModule::reshard
  void reset();                     // FSDPModule::reset_iter_state
  void set_is_last_backward(bool is_last_backward);
  void remember_collectives() const;

  void add_group(const std::shared_ptr<ParamGroup>& group);
  void add_module(const std::shared_ptr<ModuleState>& module);
  void absorb(Runtime& inner);  // an outer fully_shard joins the roots below it
  [[nodiscard]] const std::vector<std::shared_ptr<ModuleState>>& modules() const { return modules_; }
  [[nodiscard]] std::shared_ptr<ModuleState> find_module(const torch::nn::Module* address) const;

  [[nodiscard]] const std::shared_ptr<dtensor::Ledger>& ledger() const { return ledger_; }
  [[nodiscard]] const std::shared_ptr<BlockPool>& pool() const { return pool_; }
  // Before a reduction starts: waits for older ones, so that no more fly than the modules allow.
  void make_room_for_reduction();
  // Before a reduction of `indices` of `group`: meets the other ranks unless the last backward had it at this place.
  void expect_reduction(const ParamGroup& group, const std::vector<int>& indices);
  void track(const std::shared_ptr<PendingReduction>& reduction);

 private:
  [[nodiscard]] std::shared_ptr<ParamGroup> group(int id) const { return groups_[id].lock(); }
  void enter_pass();
  void reduce_leftovers();
  void end_backward();
  void gather(ParamGroup& group, c10::ArrayRef<dtensor::Owner*> owners, const dtensor::Reason& reason);
  void record(ParamGroup& group, const dtensor::Reason& reason);
  void check_off_meta(const ParamGroup& group, const dtensor::Reason& reason) const;
  void evict(c10::ArrayRef<dtensor::Owner*> owners);
  [[nodiscard]] bool may_evict(const ParamGroup& group, c10::ArrayRef<dtensor::Owner*> owners) const;
  void prefetch_learnt();
  void prefetch_after(const ParamGroup& group);
  [[nodiscard]] bool in_backward() const { return !backward_tasks_.empty(); }
  [[nodiscard]] bool is_held(const ParamGroup& group) const;
  template <class Visit>
  void for_each_group(const Visit& visit) const;

  std::recursive_mutex mutex_;
  std::shared_ptr<dtensor::Ledger> ledger_;
  std::shared_ptr<BlockPool> pool_;
  std::vector<std::weak_ptr<ParamGroup>> groups_;  // by id
  std::vector<std::shared_ptr<ModuleState>> modules_;
  Schedule schedule_;
  Schedule reduction_order_;         // of backward passes: what is reduced after what
  int current_ = -1;                 // the group gathered last; it stays while the next one is used
  std::vector<int> held_;            // ids: unshard() gathered them, and nothing used them yet
  std::vector<int> recorded_;        // ids: unshard() entered them into the schedule when it started their gather
  std::vector<int> backward_tasks_;  // ids of the graph tasks that run, outermost first
  bool in_forward_ = false;
  bool is_last_backward_ = true;
  std::vector<std::shared_ptr<PendingReduction>> reductions_;  // oldest first
};

}  // namespace fsdp::sharding
