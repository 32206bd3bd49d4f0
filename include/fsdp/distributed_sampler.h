#pragma once
// Deals the items of a dataset to the ranks: every rank draws others, and all of them together draw all, in an order
// that changes each epoch and is the same wherever it is computed.
//
//   fsdp::DistributedSampler sampler(*dataset.size(), {.num_replicas = mesh.size(), .rank = mesh.get_local_rank()});
//   auto loader = torch::data::make_data_loader(dataset, sampler, batch_size);   // the loader's copy shares all state
//   for (int64_t epoch = 0; epoch < num_epochs; ++epoch) {
//     sampler.set_epoch(epoch);   // may be left out: each pass over the loader is the next epoch
//     for (auto& batch : *loader) ...
//   }
//
// PyTorch: torch.utils.data.DistributedSampler; the same seed and epoch give the same items.
#include <fsdp/version.h>
#include <torch/data/samplers/base.h>

#include <memory>
#include <optional>
#include <vector>

namespace fsdp {

struct DistributedSamplerOptions {
  std::optional<int64_t> num_replicas = std::nullopt;  // unset: the ranks of the default group
  std::optional<int64_t> rank = std::nullopt;          // unset: that in the default group
  bool shuffle = true;                                 // false: in the dataset's order
  uint64_t seed = 0;                                   // the same on all ranks
  // Where the items do not divide by the ranks. false: the first ones of the epoch come twice. true: the last ones are
  // left out.
  bool drop_last = false;
};

// Copies are handles of the same sampler: what one of them is told holds for all. Not thread-safe.
class DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  // Errors: c10::ValueError for a rank outside 0 .. num_replicas - 1, no items, or fewer items than ranks with
  // drop_last; c10::Error when something is unset and there is no default group.
  explicit DistributedSampler(size_t num_items, const DistributedSamplerOptions& options = {});

  // The next pass is this epoch, from this rank's item `position` on. A loader with workers draws ahead of what it
  // returned; to resume such a run, count batches and give the position here.
  // Errors: c10::ValueError when negative or beyond the rank's items.
  void set_epoch(int64_t epoch, int64_t position = 0);

  // As set_epoch() or load() said for the next pass, otherwise of the pass that runs or ran last.
  [[nodiscard]] int64_t epoch() const;
  [[nodiscard]] int64_t position() const;            // how many items of the epoch this rank has drawn
  [[nodiscard]] int64_t num_items_per_rank() const;  // of every epoch; the same on all ranks

  // Begins a pass; loaders call it. It is the epoch and position of set_epoch() or load(), else the epoch after the
  // last one of which anything was drawn. Errors: as the constructor, for `new_size`.
  void reset(std::optional<size_t> new_size = std::nullopt) override;
  // Up to `batch_size` further indices of this rank; nullopt at the end of the epoch.
  std::optional<std::vector<size_t>> next(size_t batch_size) override;

  // Epoch and position, to go on from in the middle of an epoch. Every rank may load the file of any other.
  // Errors of load: c10::ValueError when it was saved with other items, ranks, seed, shuffle or drop_last, as the
  // position would then mean other items.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace fsdp
