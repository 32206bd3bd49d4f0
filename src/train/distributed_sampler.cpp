#include <fsdp/distributed_sampler.h>
#include <fsdp/process_group.h>
#include <torch/serialize/archive.h>

namespace fsdp {

struct DistributedSampler::State {
  int64_t num_items = 0;
  int64_t num_replicas = 1;
  int64_t rank = 0;
  bool shuffle = true;
  uint64_t seed = 0;
  bool drop_last = false;

  struct Place {
    int64_t epoch = 0;
    int64_t position = 0;  // items that this rank has drawn
  };
  Place place;
  std::optional<Place> next_start;  // where the next pass begins, when it was said
  bool has_begun = false;           // a pass
  std::vector<int64_t> indices;     // this rank's of the epoch; empty until they are asked for

  void set_num_items(int64_t num);
  [[nodiscard]] int64_t num_per_rank() const {
    return drop_last ? num_items / num_replicas : (num_items + num_replicas - 1) / num_replicas;
  }
  [[nodiscard]] at::Tensor order() const;
  void deal();
  void begin_pass();
  [[nodiscard]] const Place& latest() const { return next_start ? *next_start : place; }
  // What must be the same for a position to mean the same items; by name.
  [[nodiscard]] std::vector<std::pair<const char*, int64_t>> identity() const;
};

void DistributedSampler::State::set_num_items(int64_t num) {
  TORCH_CHECK_VALUE(num > 0, "DistributedSampler: the dataset is empty");
  TORCH_CHECK_VALUE(!drop_last || num >= num_replicas, "DistributedSampler: ", num, " items for ", num_replicas,
                    " ranks leave nothing with drop_last = true");
  num_items = num;
}

// Of all items [num_items], by PyTorch's generator, whose numbers are the same on every platform.
at::Tensor DistributedSampler::State::order() const {
  if (!shuffle) return at::arange(num_items, at::kLong);
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed + static_cast<uint64_t>(place.epoch));
  return at::randperm(num_items, generator, at::TensorOptions().dtype(at::kLong));
}

// Rank r takes items r, r + num_replicas, ...; the order starts anew where items are missing at the end.
void DistributedSampler::State::deal() {
  const c10::InferenceMode normal_tensors(false);
  const auto all = order();
  const auto* begin = all.const_data_ptr<int64_t>();
  indices.clear();
  for (int64_t i = 0; i < num_per_rank(); ++i) indices.push_back(begin[(rank + i * num_replicas) % num_items]);
}

void DistributedSampler::State::begin_pass() {
  if (next_start)
    place = *std::exchange(next_start, std::nullopt);
  else if (place.position > 0)
    place = {place.epoch + 1, 0};
  has_begun = true;
  indices.clear();
}

std::vector<std::pair<const char*, int64_t>> DistributedSampler::State::identity() const {
  return {{"num_items", num_items},
          {"num_replicas", num_replicas},
          {"seed", static_cast<int64_t>(seed)},
          {"shuffle", shuffle ? 1 : 0},
          {"drop_last", drop_last ? 1 : 0}};
}

DistributedSampler::DistributedSampler(size_t num_items, const DistributedSamplerOptions& options)
    : state_(std::make_shared<State>()) {
  state_->num_replicas = options.num_replicas ? *options.num_replicas : world_size();
  state_->rank = options.rank ? *options.rank : fsdp::rank();
  state_->shuffle = options.shuffle;
  state_->seed = options.seed;
  state_->drop_last = options.drop_last;
  TORCH_CHECK_VALUE(state_->num_replicas >= 1 && state_->rank >= 0 && state_->rank < state_->num_replicas,
                    "DistributedSampler: rank is ", state_->rank, " of ", state_->num_replicas,
                    " replicas; it must be from 0 to num_replicas - 1");
  state_->set_num_items(static_cast<int64_t>(num_items));
}

void DistributedSampler::set_epoch(int64_t epoch, int64_t position) {
  TORCH_CHECK_VALUE(epoch >= 0 && position >= 0 && position <= num_items_per_rank(), "DistributedSampler::set_epoch(",
                    epoch, ", ", position, "): a rank has ", num_items_per_rank(), " items an epoch");
  state_->next_start = State::Place{epoch, position};
}

int64_t DistributedSampler::epoch() const { return state_->latest().epoch; }
int64_t DistributedSampler::position() const { return state_->latest().position; }
int64_t DistributedSampler::num_items_per_rank() const { return state_->num_per_rank(); }

void DistributedSampler::reset(std::optional<size_t> new_size) {
  auto& state = *state_;
  if (new_size && static_cast<int64_t>(*new_size) != state.num_items) {
    state.set_num_items(static_cast<int64_t>(*new_size));
    if (state.next_start) state.next_start->position = 0;
  }
  state.begin_pass();
}

std::optional<std::vector<size_t>> DistributedSampler::next(size_t batch_size) {
  auto& state = *state_;
  if (!state.has_begun) state.begin_pass();
  if (state.indices.empty()) state.deal();
  auto& position = state.place.position;
  const auto end = std::min(position + static_cast<int64_t>(batch_size), state.num_per_rank());
  if (position >= end) return std::nullopt;
  std::vector<size_t> batch(state.indices.begin() + position, state.indices.begin() + end);
  position = end;
  return batch;
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  for (const auto& [name, value] : state_->identity()) archive.write(name, c10::IValue(value));
  archive.write("epoch", c10::IValue(epoch()));
  archive.write("position", c10::IValue(position()));
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  const auto read = [&archive](const char* name) {
    c10::IValue value;
    archive.read(name, value);
    return value.toInt();
  };
  const auto epoch = read("epoch");
  const auto position = read("position");
  for (const auto& [name, own] : state_->identity()) {
    const auto saved = read(name);
    TORCH_CHECK_VALUE(saved == own, "DistributedSampler: ", name, " was ", saved, " when the state was saved and is ",
                      own, " here, so position ", position, " of epoch ", epoch,
                      " would mean other items. To go on with another split, make the sampler for it and call "
                      "set_epoch(epoch, items drawn by all ranks / ranks), or set_epoch(epoch + 1)");
  }
  set_epoch(epoch, position);
}

}  // namespace fsdp
