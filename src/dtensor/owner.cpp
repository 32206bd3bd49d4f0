#include "dtensor/owner.h"

#include "dtensor/shard_state.h"

namespace fsdp::dtensor {

GatheredStorage::GatheredStorage(std::shared_ptr<Owner> owner, int index, size_t nbytes, c10::DataPtr data)
    : c10::StorageImpl(use_byte_size_t(), static_cast<int64_t>(nbytes), std::move(data), nullptr, /*resizable=*/false),
      owner(std::move(owner)),
      index(index) {}

void GatheredStorage::fill(c10::DataPtr data, size_t num_bytes) {
  clear_data_ptr_access_error_msg_();
  set_data_ptr_noswap(std::move(data));
  set_nbytes(num_bytes);
}

void GatheredStorage::release() {
  set_data_ptr_noswap(c10::DataPtr(nullptr, device()));
  set_nbytes(size_t{0});
  release_data_and_set_meta_custom_data_ptr_error_msg_(
      "the gathered copy of sharded parameter '" + owner->path(index) +
      "' was freed. Ops gather it again by themselves; raw pointers must not be kept: use fsdp::DTensor(t).to_local()");
}

// The last strong reference is gone; weak ones must not keep the owner alive.
void GatheredStorage::release_resources() {
  owner.reset();
  c10::StorageImpl::release_resources();
}

GatheredStorage* gathered_storage_of(const at::Tensor& tensor) {
  if (!has_wrapper_key(tensor) || !tensor.has_storage()) return nullptr;
  return dynamic_cast<GatheredStorage*>(tensor.storage().unsafeGetStorageImpl());
}

at::Tensor make_gathered(c10::intrusive_ptr<GatheredStorage> storage, const at::Tensor& handle, at::ScalarType dtype) {
  const c10::InferenceMode inference(false);
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(std::move(storage)), handle.key_set(),
                                                   at::scalarTypeToTypeMeta(dtype));
  impl->set_sizes_contiguous(handle.sizes());
  impl->set_version_counter(handle.unsafeGetTensorImpl()->version_counter());
  return at::Tensor(std::move(impl));
}

}  // namespace fsdp::dtensor
