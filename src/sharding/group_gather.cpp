// The gathering half of a group: shards in, whole parameters out, and the parts kept between forward and backward.
#include "sharding/group_gather.h"

#include <ATen/record_function.h>

#include <cstring>

#include "comm/group_state.h"
#include "comm/log.h"
#include "sharding/param_group.h"
#include "sharding/runtime.h"

namespace fsdp::sharding {

using dtensor::PlainScope;

namespace {

at::Tensor tail_of(const at::Tensor& row) { return row.narrow(0, row.numel() - kFingerprintBytes, kFingerprintBytes); }

// Every row of what arrived ends with the fingerprint of the rank that sent it.
void check_fingerprints(const Gather& gather, const Runtime& runtime) {
  if (!gather.fingerprint) return;
  const auto num_ranks = gather.group->getSize();
  const auto rows = gather.rows.bytes().view({num_ranks, -1});
  const auto tails = rows.narrow(1, rows.size(1) - kFingerprintBytes, kFingerprintBytes).contiguous().cpu();
  std::vector<uint64_t> words(static_cast<size_t>(num_ranks));
  std::memcpy(words.data(), tails.const_data_ptr(), words.size() * sizeof(uint64_t));
  if (gather.fingerprint->agrees_with(words)) return;
  runtime.remember_collectives();
  gather.fingerprint->check(gather.group, words);
}

// Bytes of a gathered block that each of `num_ranks` keeps; the last share is padded.
int64_t share_bytes(const FlatLayout& layout, int64_t num_ranks) {
  return align((layout.gathered_bytes + num_ranks - 1) / num_ranks, kFingerprintBytes);
}

// The bytes of share `index` that exist in a block.
std::pair<int64_t, int64_t> share_extent(const FlatLayout& layout, int64_t num_ranks, int64_t index) {
  const auto share = share_bytes(layout, num_ranks);
  const auto begin = std::min(layout.gathered_bytes, share * index);
  return {begin, std::min(layout.gathered_bytes, begin + share)};
}

}  // namespace

bool ParamGroup::is_resident() const {
  return block_.defined() && !flat_is_outdated_ && gathered_version_ == flat_version();
}

bool ParamGroup::is_in_flight() const {
  return gather_.has_value() && !flat_is_outdated_ && gather_->version == flat_version();
}

void ParamGroup::launch_gather() {
  if (is_in_flight()) return;
  drop_gather();
  if (flat_is_outdated_) rebuild_flat();
  RECORD_FUNCTION("FSDP::all_gather (" + name() + ")", c10::ArrayRef<const c10::IValue>{});
  if (comm::logs_debug())
    comm::log_line(comm::LogLevel::kDebug, "gather " + name() + (has_part() ? ", from parts" : ""));
  const PlainScope plain;
  gather_ = has_part() ? gather_parts() : gather_shards();
}

Gather ParamGroup::gather_shards() {
  Gather gather;
  gather.version = flat_version();
  gather.group = shard_group_;
  if (casts_) gather.row = cast_row();
  if (num_ranks_ == 1) return gather;
  if (casts_)
    start(gather, "all_gather", gather.row.bytes(), tail_of(gather.row.bytes()));
  else
    start(gather, "all_gather", flat_, flat_fingerprint_);
  return gather;
}

// Sends `row`, whose end is `tail`.
void ParamGroup::start(Gather& gather, const char* kind, const at::Tensor& row, const at::Tensor& tail) const {
  gather.fingerprint = comm::Fingerprint::next(gather.group, kind, name(), row.numel());
  auto bits = gather.fingerprint->bits();
  tail.copy_(at::from_blob(&bits, {kFingerprintBytes}, at::kByte));
  const auto num_bytes = gather.group->getSize() * row.numel();
  gather.rows = runtime_->pool()->acquire(num_bytes, {runtime_->ledger(), &MemoryStats::buffers, num_bytes});
  gather.work = comm::all_gather(gather.rows.bytes(), row, gather.group, name());
  runtime_->ledger()->count(&MemoryStats::num_all_gathers);
}

// This rank's shards in the dtypes they are gathered in.
Block ParamGroup::cast_row() const {
  const auto num_bytes = gather_layout_.row_bytes;
  const auto kind = num_ranks_ == 1 ? &MemoryStats::gathered : &MemoryStats::buffers;
  auto row = runtime_->pool()->acquire(num_bytes, {runtime_->ledger(), kind, num_bytes});
  for (size_t i = 0; i < slots_.size(); ++i) {
    const auto& from = layout_.slots[i];
    const auto& to = gather_layout_.slots[i];
    const auto shard = flat_.narrow(0, from.shard_offset, from.shard_bytes()).view(from.dtype);
    row.view(to.shard_offset, to.shard_numel(), to.dtype).copy_(shard);
  }
  return row;
}

Gather ParamGroup::gather_parts() {
  Gather gather;
  gather.version = part_.version;
  gather.of_parts = true;
  gather.group = part_.group;
  start(gather, "all_gather of parts", part_.bytes.bytes(), tail_of(part_.bytes.bytes()));
  return gather;
}

void ParamGroup::remember_collectives() const {
  comm::Fingerprint::remember(shard_group_, "all_gather", name(), gather_layout_.row_bytes);
}

void ParamGroup::finish_gather() {
  launch_gather();
  auto gather = std::move(*gather_);
  gather_.reset();
  const PlainScope plain;
  if (gather.work.defined()) gather.work.wait();
  gather.work = {};
  check_fingerprints(gather, *runtime_);
  if (num_ranks_ == 1) {
    block_ = casts_ ? std::move(gather.row) : Block(nullptr, flat_, layout_.shard_bytes, {});
  } else {
    if (!block_.defined()) block_ = acquire_block();
    if (gather.of_parts)
      copy_parts(gather);
    else
      copy_out(gather.rows.bytes());
  }
  gathered_version_ = gather.version;
  part_ = {};
  for (size_t i = 0; i < slots_.size(); ++i)
    if (const auto storage = slots_[i].storage.lock()) fill_storage(i, *storage);
}

Block ParamGroup::acquire_block() const {
  return runtime_->pool()->acquire(gather_layout_.gathered_bytes, {runtime_->ledger(), &MemoryStats::gathered,
                                                                   num_ranks_ * gather_layout_.shard_bytes});
}

// `rows` is [num_ranks, row_bytes]; parameter i becomes its shards in rank order, padding at the tail.
void ParamGroup::copy_out(const at::Tensor& rows) {
  for (const auto& slot : gather_layout_.slots) copy_out_slot(slot, rows);
}

void ParamGroup::copy_out_slot(const SlotLayout& slot, const at::Tensor& rows) {
  const auto num_bytes = slot.shard_bytes();
  const auto row_bytes = gather_layout_.row_bytes;
  if (slot.before == 1 && rows.is_cpu()) {  // one memcpy a shard is several times cheaper than a strided tensor copy
    const auto* source = rows.const_data_ptr<uint8_t>() + slot.shard_offset;
    auto* target = block_.bytes().mutable_data_ptr<uint8_t>() + slot.gathered_offset;
    for (int64_t r = 0; r < num_ranks_; ++r)
      std::memcpy(target + r * num_bytes, source + r * row_bytes, static_cast<size_t>(num_bytes));
    return;
  }
  // [ranks, before, chunk, after] -> [before, ranks, chunk, after]
  const auto shards = rows.view({num_ranks_, row_bytes}).narrow(1, slot.shard_offset, num_bytes).view(slot.dtype);
  block_.view(slot.gathered_offset, num_ranks_ * slot.shard_numel(), slot.dtype)
      .view({slot.before, num_ranks_, slot.chunk, slot.after})
      .copy_(shards.view({num_ranks_, slot.before, slot.chunk, slot.after}).transpose(0, 1));
}

void ParamGroup::copy_parts(const Gather& gather) {
  const int64_t num_parts = gather.group->getSize();
  const auto rows = gather.rows.bytes().view({num_parts, -1});
  for (int64_t r = 0; r < num_parts; ++r) {
    const auto [begin, end] = share_extent(gather_layout_, num_parts, r);
    if (end > begin) block_.bytes().narrow(0, begin, end - begin).copy_(rows[r].narrow(0, 0, end - begin));
  }
}

void ParamGroup::fill_storage(size_t index, dtensor::GatheredStorage& storage) {
  const auto& slot = gather_layout_.slots[index];
  auto* begin = block_.bytes().mutable_data_ptr<uint8_t>() + slot.gathered_offset;
  storage.fill(c10::DataPtr(begin, block_.bytes().device()), static_cast<size_t>(slot.shard_bytes() * num_ranks_));
}

void ParamGroup::drop_gather() {
  if (!gather_) return;
  auto gather = std::move(*gather_);
  gather_.reset();  // also when the wait fails
  if (gather.work.defined()) gather.work.wait();
}

void ParamGroup::reshard() {
  part_ = {};
  if (!block_.defined()) return;
  for (const auto& slot : slots_)
    if (const auto storage = slot.storage.lock()) storage->release();
  block_.reset();
}

void ParamGroup::keep_part(int64_t num_ranks) {
  if (!is_resident() || num_ranks <= 1 || num_ranks >= num_ranks_) return reshard();
  const PlainScope plain;
  Part part;
  part.group = comm::neighbours_of(shard_group_, static_cast<int>(num_ranks));
  part.version = gathered_version_;
  const auto num_bytes = share_bytes(gather_layout_, num_ranks) + kFingerprintBytes;
  part.bytes = runtime_->pool()->acquire(num_bytes, {runtime_->ledger(), &MemoryStats::gathered, num_bytes});
  const auto [begin, end] = share_extent(gather_layout_, num_ranks, part.group->getRank());
  if (end > begin) part.bytes.bytes().narrow(0, 0, end - begin).copy_(block_.bytes().narrow(0, begin, end - begin));
  reshard();
  part_ = std::move(part);
}

}  // namespace fsdp::sharding
