#include "sharding/block_pool.h"

#include "dtensor/shard_state.h"

namespace fsdp::sharding {

namespace {
// Enough for the blocks of root + 2 groups and two collectives in flight.
constexpr size_t kMaxFreeBlocks = 6;

bool is_good_fit(int64_t available, int64_t wanted) { return available >= wanted && available <= wanted + wanted / 4; }
}  // namespace

Block& Block::operator=(Block&& other) noexcept {
  if (this == &other) return *this;
  give_back();
  pool_ = std::move(other.pool_);
  bytes_ = std::exchange(other.bytes_, at::Tensor());
  whole_ = std::exchange(other.whole_, at::Tensor());
  charge_ = std::move(other.charge_);
  return *this;
}

at::Tensor Block::view(int64_t offset, int64_t numel, at::ScalarType dtype) const {
  const auto size = static_cast<int64_t>(c10::elementSize(dtype));
  return bytes_.narrow(0, offset, numel * size).view(dtype);
}

void Block::give_back() {
  bytes_ = at::Tensor();
  if (whole_.defined() && pool_) pool_->release(std::move(whole_));
  whole_ = at::Tensor();
  pool_.reset();
  charge_ = dtensor::Charge();
}

Block BlockPool::acquire(int64_t num_bytes, dtensor::Charge charge) {
  const dtensor::PlainScope plain;
  at::Tensor found;
  {
    const std::lock_guard lock(mutex_);
    const auto fit = std::find_if(free_.begin(), free_.end(),
                                  [&](const at::Tensor& block) { return is_good_fit(block.numel(), num_bytes); });
    if (fit != free_.end()) {
      found = std::move(*fit);
      free_.erase(fit);
    }
  }
  if (!found.defined()) found = at::empty({num_bytes}, at::TensorOptions().dtype(at::kByte).device(device_));
  return {shared_from_this(), std::move(found), num_bytes, std::move(charge)};
}

void BlockPool::release(at::Tensor bytes) {
  if (bytes.storage().use_count() > 1) return;  // somebody still looks at it
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(bytes));
  if (free_.size() > kMaxFreeBlocks) free_.erase(free_.begin());
}

}  // namespace fsdp::sharding
