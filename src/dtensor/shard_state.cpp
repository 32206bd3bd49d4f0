#include "dtensor/shard_state.h"

#include "dtensor/owner.h"
#include "dtensor/registration.h"

namespace fsdp::dtensor {

namespace {

struct HandleMeta : c10::BackendMeta {
  explicit HandleMeta(std::shared_ptr<ShardState> state) : state(std::move(state)) {}
  std::shared_ptr<ShardState> state;
};

// A storage without bytes. It carries the owner, because LibTorch releases a dead tensor's storage at once, while the
// tensor's other parts live on as long as weak references to it.
struct HandleStorage : c10::StorageImpl {
  HandleStorage(c10::Device device, std::shared_ptr<Owner> owner)
      : c10::StorageImpl(use_byte_size_t(), 0, c10::DataPtr(nullptr, device), nullptr, /*resizable=*/false),
        owner(std::move(owner)) {}
  void release_resources() override {
    owner.reset();
    c10::StorageImpl::release_resources();
  }
  std::shared_ptr<Owner> owner;
};

HandleMeta* handle_meta(const at::Tensor& tensor) {
  if (!has_wrapper_key(tensor)) return nullptr;
  return static_cast<HandleMeta*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

constexpr const char* kNoDataMessage =
    "this tensor is sharded: its values are spread over the mesh. Use fsdp::DTensor(t).to_local() for this rank's "
    "part, .full_tensor() for the whole. To save a model: fsdp::full_state_dict(module); to save an optimizer: "
    "fsdp::full_optimizer_state_dict(module, optimizer)";

}  // namespace

// target += term, run when somebody reads the target, or when the term is about to change.
class ShardState::QueuedAdd : public Pending {
 public:
  QueuedAdd(at::Tensor target, std::shared_ptr<Pending> before, std::shared_ptr<ShardState> term)
      : target_(std::move(target)), before_(std::move(before)), term_(std::move(term)) {}
  void wait() override {
    if (!term_) return;
    term_->queued_into_.reset();  // served now
    if (before_) before_->wait();
    const PlainScope plain;
    target_.add_(term_->local());
    before_.reset();
    term_.reset();
  }

 private:
  at::Tensor target_;
  std::shared_ptr<Pending> before_;
  std::shared_ptr<ShardState> term_;
};

void ShardState::serve_reader() {
  if (const auto reader = queued_into_.lock()) (void)reader->local();
}

const at::Tensor& ShardState::local() {
  serve_reader();
  if (pending_) {
    const auto pending = pending_;
    pending->wait();  // stays pending when it fails, so that every reader learns it
    pending_.reset();
  }
  return local_;
}

void ShardState::set_local(at::Tensor local) {
  serve_reader();
  pending_.reset();
  local_ = std::move(local);
}

void ShardState::queue_add(const std::shared_ptr<ShardState>& target, const std::shared_ptr<ShardState>& term) {
  target->serve_reader();
  term->serve_reader();
  // At most one addition waits: an older one is carried out first, so that no chain of buffers builds up.
  if (std::dynamic_pointer_cast<QueuedAdd>(target->pending_)) (void)target->local();
  target->pending_ = std::make_shared<QueuedAdd>(target->local_, std::move(target->pending_), term);
  term->queued_into_ = target;
}

ShardState* state_of(const at::Tensor& tensor) {
  auto* meta = handle_meta(tensor);
  return meta ? meta->state.get() : nullptr;
}

std::shared_ptr<ShardState> shared_state_of(const at::Tensor& tensor) {
  auto* meta = handle_meta(tensor);
  return meta ? meta->state : nullptr;
}

at::Tensor make_handle(std::shared_ptr<ShardState> state, at::IntArrayRef sizes, std::shared_ptr<Owner> owner) {
  ensure_dispatch_registered();
  const PlainScope plain;
  const auto& local = state->local();
  const auto device = local.device();
  auto storage = c10::make_intrusive<HandleStorage>(device, std::move(owner));
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(kNoDataMessage));
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(std::move(storage)), local.key_set().add(kWrapperKey),
                                                   local.dtype());
  impl->set_sizes_contiguous(sizes);
  impl->set_backend_meta(c10::make_intrusive<HandleMeta>(std::move(state)));
  return at::Tensor(std::move(impl));
}

void refresh_handle(const at::Tensor& handle, const at::Tensor& target) {
  auto* storage = static_cast<HandleStorage*>(handle.storage().unsafeGetStorageImpl());
  const auto fresh = make_handle(shared_state_of(handle), handle.sizes(), storage->owner);
  target.unsafeGetTensorImpl()->shallow_copy_from(fresh.getIntrusivePtr());
}

at::Tensor alias_handle(const at::Tensor& handle) {
  auto* impl = handle.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
}

std::string derived_path(const ShardState& from) {
  constexpr std::string_view kPrefix = "values computed from ";
  return from.path.starts_with(kPrefix) ? from.path : std::string(kPrefix) + from.path;
}

at::Tensor make_sharded(const DeviceMesh& mesh, Placements placements, at::Tensor local, at::IntArrayRef sizes,
                        std::string path, std::shared_ptr<Ledger> ledger) {
  const auto bytes = static_cast<int64_t>(local.nbytes());
  auto state = std::make_shared<ShardState>(mesh, std::move(placements), std::move(local), std::move(path));
  state->charge = Charge(ledger, &MemoryStats::other, bytes);
  state->ledger = std::move(ledger);
  return make_handle(std::move(state), sizes);
}

at::Tensor make_like(const ShardState& like, at::IntArrayRef sizes, at::Tensor local, std::string path) {
  if (path.empty()) path = derived_path(like);
  return make_sharded(like.mesh, like.placements, std::move(local), sizes, std::move(path), like.ledger);
}

}  // namespace fsdp::dtensor
