#pragma once
// The parameters that are gathered and reduced together: one collective each way.
//
// A group owns its shards (one flat row of bytes a rank) and, while gathered, one block with all whole parameters. It
// refers to the parameters weakly; the parameters, gathered storages and the autograd node refer to it strongly. So it
// lives as long as anything needs it, and no cycle keeps it alive.
#include <torch/csrc/autograd/function.h>

#include <optional>

#include "comm/collectives.h"
#include "dtensor/owner.h"
#include "dtensor/shard_state.h"
#include "sharding/block_pool.h"
#include "sharding/flat_layout.h"

namespace fsdp::sharding {

class ModuleState;
class PendingReduction;
class Runtime;
class UnshardNode;

struct NamedParameter {
  std::string path;
  at::Tensor tensor;
};

class ParamGroup : public dtensor::Owner, public std::enable_shared_from_this<ParamGroup> {
 public:
  // Shards `parameters` in place. 1-D mesh: over it; 2-D: over dim 1, replicated over dim 0.
  static std::shared_ptr<ParamGroup> create(const std::vector<NamedParameter>& parameters, const DeviceMesh& mesh,
                                            std::shared_ptr<Runtime> runtime);

  ~ParamGroup() override;
  ParamGroup(const ParamGroup&) = delete;
  ParamGroup& operator=(const ParamGroup&) = delete;

  // Gathered and up to date. A write to any shard, also through to_local(), makes the gathered copy stale.
  [[nodiscard]] bool is_resident() const;
  [[nodiscard]] bool has_block() const { return block_.defined(); }
  [[nodiscard]] bool is_in_flight() const { return gather_.has_value(); }
  void launch_gather();
  void finish_gather();
  void drop_gather();  // waits for a gather in flight and forgets it
  void reshard();      // frees the gathered parameters

  // The group's part of backward: reduces `grads` of the slots `indices` and returns sharded gradients, still in
  // flight.
  torch::autograd::variable_list reduce(const std::vector<int>& indices, torch::autograd::variable_list grads);
  // `node` ran: the next use makes a new one.
  void forget(const UnshardNode* node);

  // dtensor::Owner
  dtensor::Scheduler& scheduler() override;
  at::Tensor gathered(int index, const at::Tensor& handle) override;
  void write_back(int index) override;
  void replaced(int index) override;
  const std::string& path(int index) const override { return slots_[index].path; }

  [[nodiscard]] const std::shared_ptr<Runtime>& runtime() const { return runtime_; }
  [[nodiscard]] int id() const { return id_; }
  void set_runtime(std::shared_ptr<Runtime> runtime, int id);
  [[nodiscard]] std::shared_ptr<ModuleState> module() const { return module_.lock(); }
  void set_module(const std::shared_ptr<ModuleState>& module) { module_ = module; }
  [[nodiscard]] const DeviceMesh& mesh() const { return mesh_; }
  [[nodiscard]] const Placements& placements() const { return placements_; }
  // "layers.0.weight, layers.0.bias": for messages.
  [[nodiscard]] std::string name() const;
  void rename(int index, const std::string& path);  // once the outer module is known
  // Before a gather or a reduction that the others may not expect.
  void meet_to_read(const dtensor::Reason& reason) const;
  void meet_to_reduce() const;

 private:
  struct Slot {
    std::string path;
    at::Tensor local;  // a view of flat_
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> parameter{
        c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
    std::weak_ptr<dtensor::ShardState> state;
    c10::weak_intrusive_ptr<dtensor::GatheredStorage> storage{c10::intrusive_ptr<dtensor::GatheredStorage>()};
  };
  struct Gather {
    Block rows;  // uint8 [num_ranks * row_bytes]; before `work`, which refers to it
    comm::PendingCollective work;
    uint32_t version = 0;  // of flat_ at the start
  };

  ParamGroup(const DeviceMesh& mesh, std::shared_ptr<Runtime> runtime);
  void adopt(const std::vector<NamedParameter>& parameters);
  void rebuild_flat();  // after replaced()
  void allocate_flat(const std::vector<SlotShape>& shapes, c10::Device device);
  void copy_out(const at::Tensor& rows);
  void fill_storage(size_t index, dtensor::GatheredStorage& storage);
  [[nodiscard]] c10::intrusive_ptr<UnshardNode> node_for(int index, const at::Tensor& handle);
  [[nodiscard]] std::vector<int> trainable() const;
  [[nodiscard]] at::Tensor local_view(size_t index) const;
  [[nodiscard]] uint32_t flat_version() const { return static_cast<uint32_t>(flat_._version()); }
  void reduce_dtype(const std::vector<int>& indices, const std::vector<size_t>& places,
                    torch::autograd::variable_list& grads, torch::autograd::variable_list& reduced);
  void keep_local(const std::vector<int>& indices, const std::vector<size_t>& places,
                  torch::autograd::variable_list& grads, torch::autograd::variable_list& reduced);
  [[nodiscard]] at::Tensor wrap_gradient(int index, at::Tensor local, std::shared_ptr<dtensor::Pending> pending);

  DeviceMesh mesh_;
  Placements placements_;
  ProcessGroup shard_group_;
  ProcessGroup replicate_group_;  // null on a 1-D mesh
  int64_t num_ranks_;             // of shard_group_
  int64_t rank_;                  // in shard_group_
  std::shared_ptr<Runtime> runtime_;
  int id_ = -1;
  std::weak_ptr<ModuleState> module_;

  FlatLayout layout_;
  std::vector<Slot> slots_;
  at::Tensor flat_;  // uint8 [row_bytes]: this rank's row
  dtensor::Charge flat_charge_;
  bool flat_is_outdated_ = false;

  Block block_;  // uint8 [gathered_bytes]
  uint32_t gathered_version_ = 0;
  std::optional<Gather> gather_;
  // An UnshardNode; a graph that uses it keeps it alive.
  c10::weak_intrusive_ptr<torch::autograd::Node> node_{c10::intrusive_ptr<torch::autograd::Node>()};
};

}  // namespace fsdp::sharding
