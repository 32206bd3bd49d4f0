#pragma once
// Byte blocks for gathered parameters and communication buffers, kept for reuse: allocating them anew for every gather
// costs page faults. Device allocators that pool by themselves lose nothing.
#include <ATen/core/Tensor.h>

#include <mutex>
#include <vector>

#include "dtensor/ledger.h"

namespace fsdp::sharding {

class BlockPool;

// A block in use: uint8 [num_bytes] and its charge. Goes back to the pool when it dies.
class Block {
 public:
  Block() = default;
  // The first `num_bytes` of `whole`, which may be larger.
  Block(std::shared_ptr<BlockPool> pool, at::Tensor whole, int64_t num_bytes, dtensor::Charge charge)
      : pool_(std::move(pool)),
        bytes_(whole.narrow(0, 0, num_bytes)),
        whole_(std::move(whole)),
        charge_(std::move(charge)) {}
  Block(Block&& other) noexcept = default;
  Block& operator=(Block&& other) noexcept;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() { give_back(); }

  [[nodiscard]] bool defined() const { return bytes_.defined(); }
  [[nodiscard]] const at::Tensor& bytes() const { return bytes_; }
  // A view of `numel` elements from byte `offset` on.
  [[nodiscard]] at::Tensor view(int64_t offset, int64_t numel, at::ScalarType dtype) const;
  void reset() { *this = Block(); }

 private:
  void give_back();
  std::shared_ptr<BlockPool> pool_;
  at::Tensor bytes_;
  at::Tensor whole_;  // what goes back to the pool
  dtensor::Charge charge_;
};

class BlockPool : public std::enable_shared_from_this<BlockPool> {
 public:
  explicit BlockPool(c10::Device device) : device_(device) {}
  [[nodiscard]] Block acquire(int64_t num_bytes, dtensor::Charge charge);

 private:
  friend class Block;
  void release(at::Tensor bytes);

  c10::Device device_;
  std::mutex mutex_;
  std::vector<at::Tensor> free_;
};

}  // namespace fsdp::sharding
