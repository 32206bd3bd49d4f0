#pragma once
// The parameters that are gathered and reduced together: one collective each way.
//
// A group owns its shards (one flat row of bytes a rank) and, while gathered, one block with all whole parameters: the
// row itself where a single rank holds everything. It refers to the parameters weakly; the parameters, gathered
// storages and the autograd node refer to it strongly. So it lives as long as anything needs it, and no cycle keeps it
// alive.
#include <torch/csrc/autograd/function.h>

#include <optional>

#include "dtensor/owner.h"
#include "dtensor/shard_state.h"
#include "sharding/block_pool.h"
#include "sharding/flat_layout.h"
#include "sharding/group_gather.h"
#include "sharding/module_state.h"

namespace fsdp::sharding {

class PendingReduction;
struct ReductionPlan;
class Runtime;
class UnshardNode;

struct NamedParameter {
  std::string path;
  at::Tensor tensor;
  int64_t dim = 0;               // on which it is cut
  bool keeps_precision = false;  // gathered in its own dtype whatever the policy says
  DeviceMesh mesh = {};
  bool is_whole = false;  // on every rank of `mesh`, which is 1-D: not cut, only its gradient is reduced
};

class ParamGroup : public dtensor::Owner, public std::enable_shared_from_this<ParamGroup> {
 public:
  // Shards `parameters`, of one mesh and all whole or none, in place. 1-D mesh: over it, or whole; 2-D: over dim 1,
  // replicated over dim 0.
  static std::shared_ptr<ParamGroup> create(const std::vector<NamedParameter>& parameters,
                                            std::shared_ptr<Runtime> runtime, std::shared_ptr<ModuleState> module);

  ~ParamGroup() override;
  ParamGroup(const ParamGroup&) = delete;
  ParamGroup& operator=(const ParamGroup&) = delete;

  // Gathered and up to date. A write to any shard, also through to_local(), makes the gathered copy stale.
  [[nodiscard]] bool is_resident() const;
  [[nodiscard]] bool has_block() const { return block_.defined(); }
  // A gather flies, and no write made it worthless.
  [[nodiscard]] bool is_in_flight() const;
  void launch_gather();
  void finish_gather();
  void remember_collectives() const;  // for messages about other ranks
  void drop_gather();                 // waits for a gather in flight and forgets it
  void reshard();                     // frees the gathered parameters, and the part kept of them
  // Frees all but this rank's part over `num_ranks` neighbours, from which the next gather starts.
  void keep_part(int64_t num_ranks);

  // The parameters that were on the meta device when wrapped and have no values since.
  [[nodiscard]] std::vector<std::string> paths_on_meta() const;
  // Gives them memory on `device`, zeros; the others keep their values. Their handles are for the caller to refresh.
  void rebuild_on(c10::Device device);

  // The group's part of backward: reduces `grads` of the slots `indices` and returns sharded gradients, still in
  // flight; undefined ones when gradients stay on this rank for now.
  torch::autograd::variable_list reduce(const std::vector<int>& indices, torch::autograd::variable_list grads);
  // Reduces what earlier backwards left here, when no node of this backward did; adds it to `.grad`.
  void reduce_leftovers();
  void drop_leftovers();
  // The derivative of reduce(): whole gradients from `grads` of sharded ones.
  torch::autograd::variable_list reduce_backward(const std::vector<int>& indices,
                                                 const torch::autograd::variable_list& grads);
  // `node` ran (null: whichever there is): the next use makes a new one.
  void forget(const UnshardNode* node);

  // dtensor::Owner
  dtensor::Scheduler& scheduler() override;
  at::Tensor gathered(int index, const at::Tensor& handle) override;
  void write_back(int index) override;
  void replaced(int index) override;
  const std::string& path(int index) const override { return slots_[index].path; }
  dtensor::Precision precision(int index) const override;

  [[nodiscard]] const std::shared_ptr<Runtime>& runtime() const { return runtime_; }
  [[nodiscard]] int id() const { return id_; }
  void set_runtime(std::shared_ptr<Runtime> runtime, int id);
  [[nodiscard]] const ModuleState& module() const { return *module_; }
  [[nodiscard]] const DeviceMesh& mesh() const { return mesh_; }
  [[nodiscard]] bool is_whole() const { return is_whole_; }  // not cut: each rank holds all of it
  [[nodiscard]] int64_t shard_bytes() const { return layout_.shard_bytes; }
  // "layers.0.weight and 3 more": for messages.
  [[nodiscard]] std::string name() const;
  void rename(int index, const std::string& path);  // once the outer module is known
  // Before a gather or a reduction that the others may not expect.
  void meet_to_read(const dtensor::Reason& reason) const;
  void meet_to_reduce() const;

 private:
  struct Slot {
    std::string path;
    int64_t dim = 0;
    bool keeps_precision = false;
    at::Tensor local;  // a view of flat_
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> parameter{
        c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
    std::weak_ptr<dtensor::ShardState> state;
    c10::weak_intrusive_ptr<dtensor::GatheredStorage> storage{c10::intrusive_ptr<dtensor::GatheredStorage>()};
    at::Tensor unsynced;  // whole gradient of backwards without gradient sync, in reduce_dtype
    at::Tensor partial;   // own shard, summed over the shard group and not yet over the replicas
    dtensor::Charge unsynced_charge;
  };
  // The slots of one reduction: places in the lists of reduce().
  using Places = std::vector<size_t>;

  ParamGroup(const DeviceMesh& mesh, bool is_whole, std::shared_ptr<Runtime> runtime,
             std::shared_ptr<ModuleState> module);
  void adopt(const std::vector<NamedParameter>& parameters);
  void adopt_one(size_t index, const NamedParameter& parameter);
  void rebuild_flat();  // after replaced()
  void allocate_flat(const std::vector<SlotShape>& shapes, c10::Device device);
  [[nodiscard]] Placements placements_of(size_t index) const;
  [[nodiscard]] at::ScalarType gather_dtype(size_t index, at::ScalarType own) const;
  [[nodiscard]] at::Tensor local_view(size_t index) const;
  [[nodiscard]] uint32_t flat_version() const { return static_cast<uint32_t>(flat_._version()); }

  // group_gather.cpp
  [[nodiscard]] Gather gather_shards();
  [[nodiscard]] Gather gather_parts();
  void start(Gather& gather, const char* kind, const at::Tensor& row, const at::Tensor& tail) const;
  [[nodiscard]] Block cast_row() const;
  void copy_out(const at::Tensor& rows);
  void copy_out_slot(const SlotLayout& slot, const at::Tensor& rows);
  void copy_parts(const Gather& gather);
  [[nodiscard]] Block acquire_block() const;
  void fill_storage(size_t index, dtensor::GatheredStorage& storage);
  [[nodiscard]] bool has_part() const { return part_.bytes.defined() && part_.version == flat_version(); }

  [[nodiscard]] c10::intrusive_ptr<UnshardNode> node_for(int index, const at::Tensor& handle);
  [[nodiscard]] std::vector<int> trainable() const;
  void check_sequence_scope(int index) const;

  // group_reduction.cpp
  [[nodiscard]] int64_t num_all_ranks() const { return mesh_.size(); }
  [[nodiscard]] at::ScalarType reduce_dtype(int index) const;
  [[nodiscard]] std::vector<Places> places_by_dtype(const std::vector<int>& indices) const;
  void keep_unsynced(const std::vector<int>& indices, torch::autograd::variable_list& grads);
  void add_unsynced(const std::vector<int>& indices, torch::autograd::variable_list& grads);
  void reduce_places(const std::vector<int>& indices, const Places& places, torch::autograd::variable_list& grads,
                     torch::autograd::variable_list& reduced);
  [[nodiscard]] ReductionPlan plan_reduction(const std::vector<int>& indices, const Places& places,
                                             const torch::autograd::variable_list& grads);
  void fill_rows(const ReductionPlan& plan, const std::vector<int>& indices, const Places& places,
                 torch::autograd::variable_list& grads, const at::Tensor& input) const;
  void keep_partial(const std::vector<int>& indices, const Places& places, PendingReduction& pending);
  void keep_local(const std::vector<int>& indices, const Places& places, torch::autograd::variable_list& grads,
                  torch::autograd::variable_list& reduced);
  [[nodiscard]] at::Tensor wrap_gradient(int index, at::Tensor local, std::shared_ptr<dtensor::Pending> pending);

  DeviceMesh mesh_;
  bool is_whole_;
  ProcessGroup shard_group_;      // of this rank alone when parameters are whole
  ProcessGroup replicate_group_;  // null without replicas
  int64_t num_ranks_;             // of shard_group_
  int64_t rank_;                  // in shard_group_
  std::shared_ptr<Runtime> runtime_;
  int id_ = -1;
  std::shared_ptr<ModuleState> module_;  // no cycle: it refers back weakly
  MixedPrecisionPolicy mp_policy_;

  FlatLayout layout_;         // of the shards, in their own dtypes
  FlatLayout gather_layout_;  // of what is sent and gathered
  bool casts_ = false;        // the two differ
  std::vector<Slot> slots_;
  at::Tensor flat_;              // uint8 [row_bytes]: this rank's shards, and place for a fingerprint
  at::Tensor flat_fingerprint_;  // uint8 [8]: the end of flat_, with a version counter of its own
  dtensor::Charge flat_charge_;
  bool flat_is_outdated_ = false;

  Block block_;  // uint8 [gathered_bytes]
  uint32_t gathered_version_ = 0;
  std::optional<Gather> gather_;
  Part part_;
  // An UnshardNode; a graph that uses it keeps it alive.
  c10::weak_intrusive_ptr<torch::autograd::Node> node_{c10::intrusive_ptr<torch::autograd::Node>()};
};

}  // namespace fsdp::sharding
