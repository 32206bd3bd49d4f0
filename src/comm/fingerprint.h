#pragma once
// Eight bytes that travel with a gather and tell whether all ranks meant the same one.
//
//   const auto own = comm::Fingerprint::next(group, "all_gather", "layers.3", num_bytes);   // at the start, every rank
//   own.check(group, theirs);                                                      // at the end, a word from each rank
//
// Ranks that run different programs usually differ in sizes, which fails by itself. Groups of equal size would be mixed
// up in silence: hence the sequence number and the name.
#include <fsdp/process_group.h>

#include <algorithm>
#include <string>
#include <vector>

namespace fsdp::comm {

class Fingerprint {
 public:
  // Of the next collective of `group`; remembers what it was for messages.
  [[nodiscard]] static Fingerprint next(const ProcessGroup& group, const char* kind, const std::string& what,
                                        int64_t num_bytes);

  // So that a message can name a collective that only other ranks start.
  static void remember(const ProcessGroup& group, const char* kind, const std::string& what, int64_t num_bytes);

  [[nodiscard]] uint64_t bits() const { return bits_; }
  // The low bits of a hash of everything, for collectives that can only add numbers.
  [[nodiscard]] uint32_t digest() const { return static_cast<uint32_t>(bits_ ^ (bits_ >> 32U)) * 2654435761U >> 16U; }

  [[nodiscard]] bool agrees_with(const std::vector<uint64_t>& theirs) const {
    return std::all_of(theirs.begin(), theirs.end(), [this](uint64_t word) { return word == bits_; });
  }
  // `theirs`: one word a rank, in rank order. Errors: c10::DistError that says what each rank that differs does.
  void check(const ProcessGroup& group, const std::vector<uint64_t>& theirs) const;
  // The message of check(), for collectives that cannot tell who differs.
  [[noreturn]] void fail(const ProcessGroup& group, const std::string& difference) const;

 private:
  explicit Fingerprint(uint64_t bits) : bits_(bits) {}
  uint64_t bits_;  // 24 bits of sequence number, 40 bits of hash
};

}  // namespace fsdp::comm
