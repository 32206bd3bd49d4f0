#pragma once
// Bytes that CPU tensors hold, counted at the allocator.
//
//   const LiveBytes bytes;             // from zero; of all threads
//   auto loss = model.loss(x);
//   EXPECT_LE(bytes.current(), ...);   // what the graph keeps
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <memory>

namespace fsdp::testing {

class LiveBytes {
 public:
  LiveBytes() : counts_(std::make_shared<Counts>()), allocator_(counts_, c10::GetCPUAllocator()) {
    c10::SetCPUAllocator(&allocator_, kPriority);
  }
  ~LiveBytes() { c10::SetCPUAllocator(allocator_.inner, kPriority); }
  LiveBytes(const LiveBytes&) = delete;
  LiveBytes& operator=(const LiveBytes&) = delete;

  [[nodiscard]] int64_t current() const { return counts_->current; }
  [[nodiscard]] int64_t peak() const { return counts_->peak; }

 private:
  static constexpr uint8_t kPriority = 255;

  struct Counts {
    std::atomic<int64_t> current = 0, peak = 0;
    void add(int64_t bytes) {
      const auto now = current += bytes;
      auto seen = peak.load();
      while (now > seen && !peak.compare_exchange_weak(seen, now)) {
      }
    }
  };

  // What a tensor that outlives the scope still needs.
  struct Allocation {
    c10::DataPtr data;
    int64_t num_bytes;
    std::shared_ptr<Counts> counts;
    ~Allocation() { counts->add(-num_bytes); }
  };

  struct Allocator : c10::Allocator {
    Allocator(std::shared_ptr<Counts> c, c10::Allocator* i) : counts(std::move(c)), inner(i) {}
    c10::DataPtr allocate(size_t n) override {
      auto allocation = std::make_unique<Allocation>(inner->allocate(n), static_cast<int64_t>(n), counts);
      counts->add(static_cast<int64_t>(n));
      void* data = allocation->data.get();
      const auto device = allocation->data.device();
      return {data, allocation.release(), [](void* context) { delete static_cast<Allocation*>(context); }, device};
    }
    void copy_data(void* target, const void* source, size_t n) const override { default_copy_data(target, source, n); }
    std::shared_ptr<Counts> counts;
    c10::Allocator* inner;
  };

  std::shared_ptr<Counts> counts_;
  Allocator allocator_;
};

}  // namespace fsdp::testing
