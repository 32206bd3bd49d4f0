// Which rank draws what, in which epoch: alone and behind a loader of LibTorch.
#include <fsdp/distributed_sampler.h>
#include <torch/data.h>

#include <numeric>
#include <set>
#include <sstream>

#include "support/errors.h"

namespace fsdp::testing {
namespace {

using Indices = std::vector<size_t>;

Indices drawn(DistributedSampler& sampler, size_t batch_size = 3) {
  Indices all;
  sampler.reset();
  while (const auto batch = sampler.next(batch_size)) all.insert(all.end(), batch->begin(), batch->end());
  return all;
}

DistributedSampler sampler_of(size_t num_items, int64_t num_replicas, int64_t rank,
                              DistributedSamplerOptions options = {}) {
  options.num_replicas = num_replicas;
  options.rank = rank;
  return DistributedSampler(num_items, options);
}

// What all ranks draw together, sorted.
Indices union_of(size_t num_items, int64_t num_replicas, int64_t epoch, const DistributedSamplerOptions& options = {}) {
  Indices all;
  for (int64_t rank = 0; rank < num_replicas; ++rank) {
    auto sampler = sampler_of(num_items, num_replicas, rank, options);
    sampler.set_epoch(epoch);
    const auto own = drawn(sampler);
    EXPECT_EQ(static_cast<int64_t>(own.size()), sampler.num_items_per_rank());
    all.insert(all.end(), own.begin(), own.end());
  }
  std::sort(all.begin(), all.end());
  return all;
}

Indices first_items(size_t n) {
  Indices items(n);
  std::iota(items.begin(), items.end(), 0);
  return items;
}

TEST(DistributedSampler, EpochsAreDisjointCompleteAndDifferent) {  // R33
  std::set<Indices> orders;
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    EXPECT_EQ(union_of(8, 2, epoch), first_items(8));
    auto sampler = sampler_of(8, 2, 0);
    sampler.set_epoch(epoch);
    const auto once = drawn(sampler);
    sampler.set_epoch(epoch);
    EXPECT_EQ(drawn(sampler), once) << "the same seed and epoch give the same order";
    orders.insert(once);
  }
  EXPECT_EQ(orders.size(), 3U);
}

TEST(DistributedSampler, PadsOrDrops) {  // R33: 7 items on 2 ranks
  const auto padded = union_of(7, 2, 0);
  EXPECT_EQ(padded.size(), 8U);
  EXPECT_EQ(std::set<size_t>(padded.begin(), padded.end()).size(), 7U) << "exactly one comes twice";
  const auto dropped = union_of(7, 2, 0, {.drop_last = true});
  EXPECT_EQ(dropped.size(), 6U);
  EXPECT_EQ(std::set<size_t>(dropped.begin(), dropped.end()).size(), 6U) << "3 and 3, distinct";
  EXPECT_EQ(union_of(2, 5, 0).size(), 5U) << "fewer items than ranks: one each";
}

// torch.utils.data.DistributedSampler(range(10), num_replicas=3, rank=r, seed=4), set_epoch(2).
TEST(DistributedSampler, DealsAsPythonDoes) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(6);
  const auto order = at::randperm(10, generator, at::TensorOptions().dtype(at::kLong));
  for (int64_t rank = 0; rank < 3; ++rank) {
    auto sampler = sampler_of(10, 3, rank, {.seed = 4});
    sampler.set_epoch(2);
    Indices expected;
    for (int64_t i = rank; i < 12; i += 3) expected.push_back(order[i % 10].item<int64_t>());
    EXPECT_EQ(drawn(sampler), expected);
  }
  auto in_order = sampler_of(10, 3, 1, {.shuffle = false});
  EXPECT_EQ(drawn(in_order), (Indices{1, 4, 7, 0}));
}

TEST(DistributedSampler, EachPassIsTheNextEpochUnlessSaid) {
  auto sampler = sampler_of(8, 2, 0), told = sampler_of(8, 2, 0);
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    told.set_epoch(epoch);
    EXPECT_EQ(drawn(sampler), drawn(told)) << epoch;
    EXPECT_EQ(sampler.epoch(), epoch);
  }
  sampler.reset();
  sampler.reset();
  EXPECT_EQ(sampler.epoch(), 3) << "a pass of which nothing was drawn does not count";
}

struct Numbers : torch::data::datasets::Dataset<Numbers> {
  explicit Numbers(size_t num_items) : num(num_items) {}
  torch::data::Example<> get(size_t index) override {
    return {torch::tensor(static_cast<int64_t>(index)), torch::tensor(0)};
  }
  std::optional<size_t> size() const override { return num; }
  size_t num;
};

template <class Loader>
Indices pass_over(Loader& loader) {
  Indices seen;
  for (auto& batch : loader)
    for (const auto& example : batch) seen.push_back(example.data.template item<int64_t>());
  return seen;
}

TEST(DistributedSampler, HandedToALoader) {  // R33
  for (const size_t num_workers : {0, 2}) {
    auto sampler = sampler_of(9, 2, 1);
    const auto options = torch::data::DataLoaderOptions(2).workers(num_workers).enforce_ordering(true);
    auto loader = torch::data::make_data_loader(Numbers(9), sampler, options);
    for (const int64_t epoch : {4, 0, 7}) {
      sampler.set_epoch(epoch);
      auto alone = sampler_of(9, 2, 1);
      alone.set_epoch(epoch);
      EXPECT_EQ(pass_over(*loader), drawn(alone)) << "epoch " << epoch << ", " << num_workers << " workers";
    }
    auto alone = sampler_of(9, 2, 1);
    alone.set_epoch(8);
    EXPECT_EQ(pass_over(*loader), drawn(alone)) << "nothing said: the epoch after 7";
  }
}

std::string saved(const DistributedSampler& sampler) {
  torch::serialize::OutputArchive archive;
  sampler.save(archive);
  std::ostringstream out;
  archive.save_to(out);
  return out.str();
}

void load(DistributedSampler& sampler, const std::string& bytes) {
  torch::serialize::InputArchive archive;
  archive.load_from(bytes.data(), bytes.size());
  sampler.load(archive);
}

TEST(DistributedSampler, ResumesInTheMiddleOfAnEpoch) {
  auto unbroken = sampler_of(11, 2, 0);
  unbroken.set_epoch(3);
  const auto whole = drawn(unbroken);
  const auto after = drawn(unbroken);

  auto broken = sampler_of(11, 2, 0);
  broken.set_epoch(3);
  broken.reset();
  auto first = broken.next(2).value();
  const auto bytes = saved(broken);

  auto resumed = sampler_of(11, 2, 0);
  auto loader = torch::data::make_data_loader(Numbers(11), resumed, 2);
  load(resumed, bytes);  // behind the loader's back
  EXPECT_EQ(resumed.position(), 2);
  const auto rest = pass_over(*loader);
  first.insert(first.end(), rest.begin(), rest.end());
  EXPECT_EQ(first, whole);
  EXPECT_EQ(pass_over(*loader), after) << "the next epoch is whole";
}

TEST(DistributedSampler, ResumesByCountAheadOfWorkers) {
  auto sampler = sampler_of(11, 2, 1);
  sampler.set_epoch(3);
  auto whole = drawn(sampler);
  sampler.set_epoch(3, 4);
  EXPECT_EQ(drawn(sampler), Indices(whole.begin() + 4, whole.end()));
}

TEST(DistributedSampler, RefusesTheStateOfAnotherSplit) {  // R22
  const auto bytes = saved(sampler_of(12, 4, 0));
  auto other = sampler_of(12, 2, 0);
  EXPECT_ERROR(load(other, bytes), c10::ValueError, "num_replicas was 4 when the state was saved and is 2");
  auto reseeded = sampler_of(12, 4, 0, {.seed = 1});
  EXPECT_ERROR(load(reseeded, bytes), c10::ValueError, "seed was 0");
  auto neighbour = sampler_of(12, 4, 3);
  load(neighbour, bytes);
}

TEST(DistributedSampler, APassThatRunsIsNotDisturbed) {
  auto sampler = sampler_of(8, 2, 0), alone = sampler_of(8, 2, 0);
  const auto whole = drawn(alone);
  auto items = sampler.next(2).value();  // without reset(), as after construction
  sampler.set_epoch(5);
  EXPECT_EQ(sampler.epoch(), 5);
  const auto rest = sampler.next(9).value();
  items.insert(items.end(), rest.begin(), rest.end());
  EXPECT_EQ(items, whole);
  EXPECT_FALSE(sampler.next(1)) << "exhausted until reset()";
  alone.set_epoch(5);
  EXPECT_EQ(drawn(sampler), drawn(alone));
}

TEST(DistributedSampler, Misuse) {
  EXPECT_ERROR(sampler_of(8, 2, 2), c10::ValueError, "rank is 2 of 2 replicas");
  EXPECT_ERROR(sampler_of(0, 2, 0), c10::ValueError, "empty");
  EXPECT_ERROR(sampler_of(1, 2, 0, {.drop_last = true}), c10::ValueError, "leave nothing");
  auto sampler = sampler_of(8, 2, 0);
  EXPECT_ERROR(sampler.set_epoch(0, 5), c10::ValueError, "a rank has 4 items an epoch");
  EXPECT_ERROR(sampler.set_epoch(-1), c10::ValueError, "set_epoch(-1, 0)");
}

}  // namespace
}  // namespace fsdp::testing
