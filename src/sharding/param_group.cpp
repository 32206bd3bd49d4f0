#include "sharding/param_group.h"

#include <cstring>

#include "comm/group_state.h"
#include "comm/meeting.h"
#include "sharding/runtime.h"
#include "sharding/unshard_node.h"

namespace fsdp::sharding {

using dtensor::PlainScope;

ParamGroup::ParamGroup(const DeviceMesh& mesh, std::shared_ptr<Runtime> runtime)
    : mesh_(mesh), runtime_(std::move(runtime)) {
  const int64_t shard_dim = mesh.ndim() - 1;
  placements_.assign(static_cast<size_t>(shard_dim), Replicate{});
  placements_.emplace_back(Shard{0});
  shard_group_ = mesh.get_group(shard_dim);
  if (shard_dim > 0) replicate_group_ = mesh.get_group(0);
  num_ranks_ = mesh.size(shard_dim);
  rank_ = mesh.get_local_rank(shard_dim);
}

// A gather in flight still writes to its block, which goes back to the pool.
ParamGroup::~ParamGroup() {
  try {
    drop_gather();
  } catch (const std::exception&) {
    // A peer left; whoever waits for a result hears of it.
  }
}

std::shared_ptr<ParamGroup> ParamGroup::create(const std::vector<NamedParameter>& parameters, const DeviceMesh& mesh,
                                               std::shared_ptr<Runtime> runtime) {
  std::shared_ptr<ParamGroup> group(new ParamGroup(mesh, runtime));
  runtime->add_group(group);
  group->adopt(parameters);
  return group;
}

void ParamGroup::set_runtime(std::shared_ptr<Runtime> runtime, int id) {
  runtime_ = std::move(runtime);
  id_ = id;
}

// Each parameter keeps its TensorImpl, so that members, registry and optimizer go on sharing it; only its content
// changes.
void ParamGroup::adopt(const std::vector<NamedParameter>& parameters) {
  const PlainScope plain;
  std::vector<SlotShape> shapes;
  for (const auto& [path, tensor] : parameters) shapes.push_back({tensor.sizes().vec(), tensor.scalar_type()});
  allocate_flat(shapes, parameters.front().tensor.device());
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [path, tensor] = parameters[i];
    const auto [begin, end] = own_rows(layout_.slots[i], rank_);
    auto local = local_view(i);
    local.copy_(tensor.detach().narrow(0, begin, end - begin));
    auto state = std::make_shared<dtensor::ShardState>(mesh_, placements_, local, path);
    state->owner = this;
    state->index = static_cast<int>(i);
    state->ledger = runtime_->ledger();
    Slot slot;
    slot.path = path;
    slot.local = local;
    slot.parameter = tensor.getIntrusivePtr();
    slot.state = state;
    slots_.push_back(std::move(slot));
    auto* impl = tensor.unsafeGetTensorImpl();
    impl->shallow_copy_from(
        dtensor::make_handle(std::move(state), layout_.slots[i].sizes, shared_from_this()).getIntrusivePtr());
  }
}

void ParamGroup::allocate_flat(const std::vector<SlotShape>& shapes, c10::Device device) {
  layout_ = make_layout(shapes, num_ranks_);
  flat_ = at::zeros({layout_.row_bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  flat_charge_ = dtensor::Charge();  // gives back what the row before cost
  flat_charge_ = dtensor::Charge(runtime_->ledger(), &MemoryStats::parameters, layout_.row_bytes);
}

at::Tensor ParamGroup::local_view(size_t index) const {
  const auto& slot = layout_.slots[index];
  const auto [begin, end] = own_rows(slot, rank_);
  auto sizes = slot.sizes;
  sizes[0] = end - begin;
  const auto num_bytes = (end - begin) * slot.row_numel * slot.itemsize();
  return flat_.narrow(0, slot.shard_offset, num_bytes).view(slot.dtype).view(sizes);
}

void ParamGroup::rebuild_flat() {
  const PlainScope plain;
  std::vector<SlotShape> shapes;
  const auto device = slots_.front().local.device();
  for (size_t i = 0; i < slots_.size(); ++i) {
    TORCH_CHECK(slots_[i].local.device() == device, "parameters of one group are on different devices: '",
                slots_.front().path, "' on ", device, ", '", slots_[i].path, "' on ", slots_[i].local.device());
    shapes.push_back({layout_.slots[i].sizes, slots_[i].local.scalar_type()});
  }
  allocate_flat(shapes, device);
  for (size_t i = 0; i < slots_.size(); ++i) {
    auto local = local_view(i);
    local.copy_(slots_[i].local);
    slots_[i].local = local;
    if (const auto state = slots_[i].state.lock()) state->set_local(local);
  }
  flat_is_outdated_ = false;
}

bool ParamGroup::is_resident() const {
  return block_.defined() && !flat_is_outdated_ && gathered_version_ == flat_version();
}

void ParamGroup::launch_gather() {
  if (gather_ && gather_->version == flat_version() && !flat_is_outdated_) return;
  drop_gather();
  if (flat_is_outdated_) rebuild_flat();
  const PlainScope plain;
  Gather gather;
  gather.version = flat_version();
  if (num_ranks_ > 1) {
    const auto num_bytes = num_ranks_ * layout_.row_bytes;
    gather.rows = runtime_->pool()->acquire(num_bytes, {runtime_->ledger(), &MemoryStats::buffers, num_bytes});
    gather.work = comm::all_gather(gather.rows.bytes(), flat_, shard_group_, name());
    runtime_->ledger()->count(&MemoryStats::num_all_gathers);
  }
  gather_ = std::move(gather);
}

void ParamGroup::finish_gather() {
  launch_gather();
  auto gather = std::move(*gather_);
  gather_.reset();
  const PlainScope plain;
  if (gather.work.defined()) gather.work.wait();
  gather.work = {};
  if (!block_.defined())
    block_ = runtime_->pool()->acquire(layout_.gathered_bytes,
                                       {runtime_->ledger(), &MemoryStats::gathered, num_ranks_ * layout_.row_bytes});
  copy_out(gather.rows.defined() ? gather.rows.bytes() : flat_);
  gathered_version_ = gather.version;
  for (size_t i = 0; i < slots_.size(); ++i)
    if (const auto storage = slots_[i].storage.lock()) fill_storage(i, *storage);
}

// `rows` is [num_ranks, row_bytes]; parameter i becomes its shards in rank order, padding at the tail.
void ParamGroup::copy_out(const at::Tensor& rows) {
  const bool on_cpu = rows.is_cpu();
  for (const auto& slot : layout_.slots) {
    const auto num_bytes = slot.shard_bytes();
    if (on_cpu) {  // one memcpy a shard is several times cheaper than a strided tensor copy of small shards
      const auto* source = rows.const_data_ptr<uint8_t>() + slot.shard_offset;
      auto* target = block_.bytes().mutable_data_ptr<uint8_t>() + slot.gathered_offset;
      for (int64_t r = 0; r < num_ranks_; ++r)
        std::memcpy(target + r * num_bytes, source + r * layout_.row_bytes, static_cast<size_t>(num_bytes));
    } else {
      const auto source = rows.view({num_ranks_, layout_.row_bytes}).narrow(1, slot.shard_offset, num_bytes);
      block_.bytes()
          .narrow(0, slot.gathered_offset, num_ranks_ * num_bytes)
          .view({num_ranks_, num_bytes})
          .copy_(source);
    }
  }
}

void ParamGroup::fill_storage(size_t index, dtensor::GatheredStorage& storage) {
  const auto& slot = layout_.slots[index];
  auto* begin = block_.bytes().mutable_data_ptr<uint8_t>() + slot.gathered_offset;
  storage.fill(c10::DataPtr(begin, block_.bytes().device()), static_cast<size_t>(slot.shard_bytes() * num_ranks_));
}

void ParamGroup::drop_gather() {
  if (!gather_) return;
  if (gather_->work.defined()) gather_->work.wait();
  gather_.reset();
}

void ParamGroup::reshard() {
  if (!block_.defined()) return;
  for (const auto& slot : slots_)
    if (const auto storage = slot.storage.lock()) storage->release();
  block_.reset();
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
  auto tensor = dtensor::make_gathered(std::move(storage), handle);
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

// One node for all trainable parameters of the group, shared by all uses until its backward ran or the set changed:
// hence one reduce-scatter a backward. An alias that requires grad by itself gets a node of its own.
c10::intrusive_ptr<UnshardNode> ParamGroup::node_for(int index, const at::Tensor& handle) {
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
    const auto& slot = layout_.slots[i];
    node->add_input_metadata(at::TensorOptions().dtype(slot.dtype).device(flat_.device()),
                             c10::fromIntArrayRefSlow(slot.sizes), false, false, slot.dtype);
  }
  if (is_parameter) node_ = c10::intrusive_ptr<torch::autograd::Node>(node);
  return node;
}

void ParamGroup::forget(const UnshardNode* node) {
  if (node_.lock().get() == node) node_ = c10::intrusive_ptr<torch::autograd::Node>();
}

void ParamGroup::write_back(int index) {
  const PlainScope plain;
  const auto& slot = layout_.slots[index];
  const auto [begin, end] = own_rows(slot, rank_);
  const auto whole = block_.view(slot.gathered_offset, slot.rows * slot.row_numel, slot.dtype);
  const auto own = whole.narrow(0, begin * slot.row_numel, (end - begin) * slot.row_numel);
  slots_[index].local.copy_(own.view(slots_[index].local.sizes()));  // the gathered copy counts as stale from here on
}

void ParamGroup::replaced(int index) {
  drop_gather();
  reshard();
  auto& slot = slots_[index];
  if (const auto state = slot.state.lock()) slot.local = state->local();
  // Views of the old dtype stay without values rather than show bytes of the new one.
  slot.storage = c10::intrusive_ptr<dtensor::GatheredStorage>();
  node_ = c10::intrusive_ptr<torch::autograd::Node>();  // its metadata speaks of the old dtype
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
  comm::meeting_of(shard_group_)->meet(reason.str());
}

void ParamGroup::meet_to_reduce() const {
  if (num_ranks_ == 1) return;
  runtime_->ledger()->count(&MemoryStats::num_meetings);
  comm::meeting_of(shard_group_)->meet_to("reduce the gradients of " + name());
}

}  // namespace fsdp::sharding
