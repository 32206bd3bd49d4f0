#pragma once
// Counts bytes and collectives of one root, and remembers what its user was told. Roots that are merged by an outer
// fully_shard keep one ledger: the inner one forwards to the outer. Every ledger also feeds the ledger of the process.
#include <fsdp/memory_stats.h>

#include <memory>
#include <mutex>
#include <set>
#include <string>

namespace fsdp::dtensor {

class Ledger {
 public:
  using Field = MemoryStats::Bytes MemoryStats::*;
  using Counter = int64_t MemoryStats::*;

  Ledger() = default;
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  // The sum over all ledgers; what memory_stats() without argument reads.
  static Ledger& process();

  void add(Field field, int64_t bytes);
  void count(Counter counter);
  [[nodiscard]] MemoryStats read() const;
  void reset_peaks();
  // Whether `topic` is mentioned for the first time, so that an advice is given once.
  [[nodiscard]] bool is_first_mention(const std::string& topic);
  // Adds everything `inner` holds and makes it forward here from now on.
  static void merge(const std::shared_ptr<Ledger>& inner, const std::shared_ptr<Ledger>& outer);

 private:
  void add_here(Field field, int64_t bytes);

  mutable std::mutex mutex_;
  MemoryStats stats_;
  std::set<std::string> mentioned_;
  std::shared_ptr<Ledger> merged_into_;
};

// Bytes charged to a ledger for as long as this object lives.
class Charge {
 public:
  Charge() = default;
  Charge(std::shared_ptr<Ledger> ledger, Ledger::Field field, int64_t bytes);
  Charge(Charge&& other) noexcept { swap(other); }
  Charge& operator=(Charge&& other) noexcept {
    swap(other);
    return *this;
  }
  Charge(const Charge&) = delete;
  Charge& operator=(const Charge&) = delete;
  ~Charge();

 private:
  void swap(Charge& other) noexcept {
    std::swap(ledger_, other.ledger_);
    std::swap(field_, other.field_);
    std::swap(bytes_, other.bytes_);
  }
  std::shared_ptr<Ledger> ledger_;
  Ledger::Field field_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace fsdp::dtensor
