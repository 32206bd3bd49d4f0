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

  // In front of the bytes of a tensor, which may outlive the scope. LibTorch's kernels also allocate without DataPtr
  // and want the address that they free to be that of the bytes.
  struct alignas(64) Header {
    int64_t num_bytes;
    c10::Allocator* inner;
    std::shared_ptr<Counts> counts;
  };

  struct Allocator : c10::Allocator {
    Allocator(std::shared_ptr<Counts> c, c10::Allocator* i) : counts(std::move(c)), inner(i) {}
    c10::DataPtr allocate(size_t n) override {
      auto* base = static_cast<char*>(inner->raw_allocate(n + sizeof(Header)));
      new (base) Header{static_cast<int64_t>(n), inner, counts};
      counts->add(static_cast<int64_t>(n));
      char* data = base + sizeof(Header);
      return {data, data, &release, c10::Device(c10::kCPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* target, const void* source, size_t n) const override { default_copy_data(target, source, n); }

    static void release(void* data) {
      if (!data) return;
      auto* header = reinterpret_cast<Header*>(static_cast<char*>(data) - sizeof(Header));
      header->counts->add(-header->num_bytes);
      auto* inner = header->inner;
      header->~Header();
      inner->raw_deallocate(header);
    }
    std::shared_ptr<Counts> counts;
    c10::Allocator* inner;
  };

  std::shared_ptr<Counts> counts_;
  Allocator allocator_;
};

}  // namespace fsdp::testing
