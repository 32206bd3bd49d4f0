#include "sharding/param_group.h"

#include "comm/group_state.h"
#include "comm/log.h"
#include "comm/meeting.h"
#include "mesh/sequence_scope.h"
#include "sharding/runtime.h"
#include "sharding/unshard_node.h"

namespace fsdp::sharding {

using dtensor::PlainScope;

ParamGroup::ParamGroup(const DeviceMesh& mesh, bool is_whole, std::shared_ptr<Runtime> runtime,
                       std::shared_ptr<ModuleState> module)
    : mesh_(mesh),
      is_whole_(is_whole),
      shard_group_(mesh.get_group(mesh.ndim() - 1)),
      runtime_(std::move(runtime)),
      module_(std::move(module)),
      mp_policy_(module_->mp_policy) {
  if (is_whole || mesh.ndim() > 1) replicate_group_ = mesh.get_group(0);
  if (is_whole) shard_group_ = comm::neighbours_of(shard_group_, 1);
  num_ranks_ = shard_group_->getSize();
  rank_ = shard_group_->getRank();
}

// A gather in flight still writes to its block, which goes back to the pool.
ParamGroup::~ParamGroup() {
  try {
    drop_gather();
  } catch (const std::exception& error) {  // a peer left; whoever waits for a result hears of it too
    comm::log_line(comm::LogLevel::kInfo, c10::str("a parameter group ends while a gather flies: ", error.what()));
  }
}

std::shared_ptr<ParamGroup> ParamGroup::create(const std::vector<NamedParameter>& parameters,
                                               std::shared_ptr<Runtime> runtime, std::shared_ptr<ModuleState> module) {
  const auto& first = parameters.front();
  std::shared_ptr<ParamGroup> group(new ParamGroup(first.mesh, first.is_whole, runtime, std::move(module)));
  runtime->add_group(group);
  group->adopt(parameters);
  return group;
}

void ParamGroup::set_runtime(std::shared_ptr<Runtime> runtime, int id) {
  runtime_ = std::move(runtime);
  id_ = id;
}

Placements ParamGroup::placements_of(size_t index) const {
  if (is_whole_) return {Replicate{}};
  Placements placements(static_cast<size_t>(mesh_.ndim() - 1), Replicate{});
  placements.emplace_back(Shard{slots_[index].dim});
  return placements;
}

at::ScalarType ParamGroup::gather_dtype(size_t index, at::ScalarType own) const {
  const bool casts = mp_policy_.param_dtype && !slots_[index].keeps_precision && at::isFloatingType(own);
  return casts ? *mp_policy_.param_dtype : own;
}

void ParamGroup::adopt(const std::vector<NamedParameter>& parameters) {
  const PlainScope plain;
  std::vector<SlotShape> shapes;
  slots_.resize(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& parameter = parameters[i];
    slots_[i].path = parameter.path;
    slots_[i].dim = parameter.dim;
    slots_[i].keeps_precision = parameter.keeps_precision;
    shapes.push_back({parameter.tensor.sizes().vec(), parameter.tensor.scalar_type(), parameter.dim});
  }
  allocate_flat(shapes, parameters.front().tensor.device());
  for (size_t i = 0; i < parameters.size(); ++i) adopt_one(i, parameters[i]);
}

// Each parameter keeps its TensorImpl, so that members, registry and optimizer go on sharing it; only its content
// changes.
void ParamGroup::adopt_one(size_t index, const NamedParameter& parameter) {
  const auto& layout = layout_.slots[index];
  const auto [begin, end] = layout.rows_of(rank_);
  auto& slot = slots_[index];
  slot.local = local_view(index);
  slot.local.copy_(parameter.tensor.detach().narrow(layout.dim, begin, end - begin));
  auto state = std::make_shared<dtensor::ShardState>(mesh_, placements_of(index), slot.local, parameter.path);
  state->owner = this;
  state->index = static_cast<int>(index);
  state->ledger = runtime_->ledger();
  slot.parameter = parameter.tensor.getIntrusivePtr();
  slot.state = state;
  auto* impl = parameter.tensor.unsafeGetTensorImpl();
  impl->shallow_copy_from(dtensor::make_handle(std::move(state), layout.sizes, shared_from_this()).getIntrusivePtr());
}

void ParamGroup::allocate_flat(const std::vector<SlotShape>& shapes, c10::Device device) {
  layout_ = make_layout(shapes, num_ranks_);
  auto gather_shapes = shapes;
  casts_ = false;
  for (size_t i = 0; i < shapes.size(); ++i) {
    gather_shapes[i].dtype = gather_dtype(i, shapes[i].dtype);
    casts_ = casts_ || gather_shapes[i].dtype != shapes[i].dtype;
  }
  gather_layout_ = make_layout(gather_shapes, num_ranks_);
  flat_ = at::zeros({layout_.row_bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  // Stamping a fingerprint is no write to the shards, hence the version counter of its own.
  flat_fingerprint_ = flat_.variable_data().narrow(0, layout_.row_bytes - kFingerprintBytes, kFingerprintBytes);
  flat_charge_ = dtensor::Charge();  // gives back what the row before cost
  const int64_t num_bytes = device.is_meta() ? 0 : layout_.shard_bytes;
  flat_charge_ = dtensor::Charge(runtime_->ledger(), &MemoryStats::parameters, num_bytes);
}

at::Tensor ParamGroup::local_view(size_t index) const {
  const auto& slot = layout_.slots[index];
  const auto sizes = slot.shard_sizes(rank_);
  const auto num_bytes = c10::multiply_integers(sizes) * slot.itemsize();
  return flat_.narrow(0, slot.shard_offset, num_bytes).view(slot.dtype).view(sizes);
}

void ParamGroup::rebuild_flat() {
  const auto device = slots_.front().local.device();
  for (const auto& slot : slots_)
    TORCH_CHECK(slot.local.device() == device, "parameters of one group are on different devices: '",
                slots_.front().path, "' on ", device, ", '", slot.path, "' on ", slot.local.device());
  rebuild_on(device);
}

std::vector<std::string> ParamGroup::paths_on_meta() const {
  std::vector<std::string> paths;
  for (const auto& slot : slots_)
    if (slot.local.is_meta()) paths.push_back(slot.path);
  return paths;
}

void ParamGroup::rebuild_on(c10::Device device) {
  const PlainScope plain;
  std::vector<SlotShape> shapes;
  for (size_t i = 0; i < slots_.size(); ++i)
    shapes.push_back({layout_.slots[i].sizes, slots_[i].local.scalar_type(), slots_[i].dim});
  allocate_flat(shapes, device);
  for (size_t i = 0; i < slots_.size(); ++i) {
    auto local = local_view(i);
    if (!slots_[i].local.is_meta()) local.copy_(slots_[i].local);
    slots_[i].local = local;
    if (const auto state = slots_[i].state.lock()) state->set_local(local);
  }
  flat_is_outdated_ = false;
  node_ = c10::intrusive_ptr<torch::autograd::Node>();  // its metadata speaks of the old device and dtype
}

dtensor::Precision ParamGroup::precision(int index) const {
  const auto dtype = gather_layout_.slots[static_cast<size_t>(index)].dtype;
  const bool is_lowered = dtype != layout_.slots[static_cast<size_t>(index)].dtype;
  const bool casts = is_lowered && mp_policy_.cast_forward_inputs;
  return {dtype, is_lowered, casts ? std::optional(dtype) : std::nullopt};
}

dtensor::Scheduler& ParamGroup::scheduler() { return *runtime_; }

at::Tensor ParamGroup::gathered(int index, const at::Tensor& handle) {
  auto& slot = slots_[index];
  auto storage = slot.storage.lock();
  if (!storage) {
    storage = c10::make_intrusive<dtensor::GatheredStorage>(shared_from_this(), index, size_t{0},
                                                            c10::DataPtr(nullptr, handle.device()));
    fill_storage(static_cast<size_t>(index), *storage);
    slot.storage = storage;
  }
  auto tensor = dtensor::make_gathered(std::move(storage), handle, precision(index).dtype);
  if (!at::GradMode::is_enabled() || !handle.requires_grad()) return tensor;
  const auto node = node_for(index, handle);
  torch::autograd::impl::set_gradient_edge(tensor, {node, node->output_of(index)});
  return tensor;
}

std::vector<int> ParamGroup::trainable() const {
  std::vector<int> indices;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const auto parameter = slots_[i].parameter.lock();
    if (parameter && parameter->requires_grad()) indices.push_back(static_cast<int>(i));
  }
  return indices;
}

// Ranks that share a sequence see different tokens: their gradients must meet.
void ParamGroup::check_sequence_scope(int index) const {
  const auto* scope = mesh::SequenceScope::active();
  if (!scope) return;
  const auto ranks = mesh_.mesh().flatten();
  for (const auto rank : scope->ranks())
    TORCH_CHECK_VALUE(ranks.eq(rank).any().item<bool>(), "parameter '", slots_[index].path,
                      "' is used inside context_parallel over the ranks ", at::IntArrayRef(scope->ranks()),
                      ", but its gradient is averaged over others: they would train apart. Hint: fully_shard over both "
                      "mesh dims, as in dp_mesh_dims = {.shard = {\"dp\", \"cp\"}} or "
                      "{.shard = {\"dp\"}, .replicate = {\"cp\"}}");
}

// One node for all trainable parameters of the group, shared by all uses until its backward ran or the set changed:
// hence one reduce-scatter a backward. An alias that requires grad by itself gets a node of its own.
c10::intrusive_ptr<UnshardNode> ParamGroup::node_for(int index, const at::Tensor& handle) {
  check_sequence_scope(index);
  const bool is_parameter = slots_[index].parameter.lock().get() == handle.unsafeGetTensorImpl();
  std::vector<int> indices = is_parameter ? trainable() : std::vector<int>{index};
  if (is_parameter) {
    const auto locked = node_.lock();
    auto* known = static_cast<UnshardNode*>(locked.get());
    if (known && known->indices() == indices) return c10::intrusive_ptr<UnshardNode>::reclaim_copy(known);
  }
  torch::autograd::edge_list edges;
  for (const int i : indices) {
    const auto target = is_parameter ? at::Tensor(slots_[i].parameter.lock()) : handle;
    edges.push_back(torch::autograd::impl::gradient_edge(target));
  }
  auto node = c10::make_intrusive<UnshardNode>(shared_from_this(), std::move(indices), std::move(edges));
  for (const int i : node->indices()) {
    const auto& slot = gather_layout_.slots[i];
    node->add_input_metadata(at::TensorOptions().dtype(slot.dtype).device(flat_.device()),
                             c10::fromIntArrayRefSlow(slot.sizes), false, false, slot.dtype);
  }
  if (is_parameter) node_ = c10::intrusive_ptr<torch::autograd::Node>(node);
  return node;
}

void ParamGroup::forget(const UnshardNode* node) {
  if (!node || node_.lock().get() == node) node_ = c10::intrusive_ptr<torch::autograd::Node>();
}

void ParamGroup::write_back(int index) {
  const PlainScope plain;
  const auto& slot = gather_layout_.slots[index];
  const auto [begin, end] = slot.rows_of(rank_);
  const auto whole = block_.view(slot.gathered_offset, slot.numel(), slot.dtype).view(slot.sizes);
  slots_[index].local.copy_(whole.narrow(slot.dim, begin, end - begin));  // the gathered copy is stale from here on
}

void ParamGroup::replaced(int index) {
  drop_gather();
  reshard();
  auto& slot = slots_[index];
  if (const auto state = slot.state.lock()) slot.local = state->local();
  // Views of the old dtype stay without values rather than show bytes of the new one.
  slot.storage = c10::intrusive_ptr<dtensor::GatheredStorage>();
  flat_is_outdated_ = true;
}

std::string ParamGroup::name() const {
  const auto& first = slots_.front().path;
  return slots_.size() == 1 ? first : first + " and " + std::to_string(slots_.size() - 1) + " more";
}

void ParamGroup::rename(int index, const std::string& path) {
  slots_[index].path = path;
  if (const auto state = slots_[index].state.lock()) state->path = path;
}

void ParamGroup::meet_to_read(const dtensor::Reason& reason) const {
  if (num_ranks_ == 1) return;
  runtime_->ledger()->count(&MemoryStats::num_meetings);
  comm::meeting_of(shard_group_)->meet(reason.str(), "gather " + name());
}

void ParamGroup::meet_to_reduce() const {
  for (const auto& group : {shard_group_, replicate_group_}) {
    if (!group || group->getSize() == 1) continue;
    runtime_->ledger()->count(&MemoryStats::num_meetings);
    comm::meeting_of(group)->meet_to("reduce the gradients of " + name());
  }
}

}  // namespace fsdp::sharding
