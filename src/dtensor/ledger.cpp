#include "dtensor/ledger.h"

#include <algorithm>
#include <array>

#include "comm/immortal.h"

namespace fsdp::dtensor {

namespace {
constexpr std::array<Ledger::Field, 5> kByteFields{&MemoryStats::parameters, &MemoryStats::gradients,
                                                   &MemoryStats::other, &MemoryStats::gathered, &MemoryStats::buffers};
constexpr std::array<Ledger::Counter, 3> kCounters{&MemoryStats::num_all_gathers, &MemoryStats::num_reduce_scatters,
                                                   &MemoryStats::num_meetings};
}  // namespace

Ledger& Ledger::process() {
  static comm::Immortal<Ledger> ledger;  // a static model outlives a static ledger
  return ledger.get();
}

void Ledger::add_here(Field field, int64_t bytes) {
  auto& entry = stats_.*field;
  entry.current += bytes;
  entry.peak = std::max(entry.peak, entry.current);
}

void Ledger::add(Field field, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (merged_into_) return merged_into_->add(field, bytes);
  add_here(field, bytes);
  if (this != &process()) process().add(field, bytes);
}

void Ledger::count(Counter counter) {
  const std::lock_guard lock(mutex_);
  if (merged_into_) return merged_into_->count(counter);
  ++(stats_.*counter);
  if (this != &process()) process().count(counter);
}

MemoryStats Ledger::read() const {
  const std::lock_guard lock(mutex_);
  return merged_into_ ? merged_into_->read() : stats_;
}

void Ledger::reset_peaks() {
  const std::lock_guard lock(mutex_);
  if (merged_into_) return merged_into_->reset_peaks();
  for (const auto field : kByteFields) (stats_.*field).peak = (stats_.*field).current;
}

bool Ledger::is_first_mention(const std::string& topic) {
  const std::lock_guard lock(mutex_);
  return merged_into_ ? merged_into_->is_first_mention(topic) : mentioned_.insert(topic).second;
}

void Ledger::merge(const std::shared_ptr<Ledger>& inner, const std::shared_ptr<Ledger>& outer) {
  if (inner == outer) return;
  const std::scoped_lock lock(inner->mutex_, outer->mutex_);
  for (const auto field : kByteFields) outer->add_here(field, (inner->stats_.*field).current);
  for (const auto counter : kCounters) outer->stats_.*counter += inner->stats_.*counter;
  inner->merged_into_ = outer;
}

Charge::Charge(std::shared_ptr<Ledger> ledger, Ledger::Field field, int64_t bytes)
    : ledger_(std::move(ledger)), field_(field), bytes_(bytes) {
  if (ledger_) ledger_->add(field_, bytes_);
}

Charge::~Charge() {
  if (ledger_) ledger_->add(field_, -bytes_);
}

}  // namespace fsdp::dtensor

namespace fsdp {

MemoryStats memory_stats() { return dtensor::Ledger::process().read(); }

}  // namespace fsdp
