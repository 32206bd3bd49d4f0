#include "parallel/checkpoint_frame.h"

#include <torch/csrc/autograd/engine.h>

#include <sstream>

namespace fsdp::parallel {

namespace {

constexpr const char* kDeterminismHint =
    ". Hint: state that changes between forward and backward (counters, requires_grad, train() and eval()) must not "
    "decide what the function computes";

[[noreturn]] void throw_checkpoint_error(uint32_t line, const std::string& message) {
  throw CheckpointError({"checkpoint", "src/parallel/checkpoint_frame.cpp", line}, message);
}

// Leaves the function once all tensors are there. A std::exception, because a backward inside the function hands on no
// other.
class EverythingComputed : public std::exception {
 public:
  [[nodiscard]] const char* what() const noexcept override { return "checkpoint: all tensors are computed again"; }
};

}  // namespace

TensorDescription::TensorDescription(const at::Tensor& tensor)
    : sizes(tensor.sizes().vec()), dtype(tensor.scalar_type()), device(tensor.device()) {}

std::string TensorDescription::str() const {
  std::ostringstream out;
  out << at::IntArrayRef(sizes) << ' ' << c10::toString(dtype) << " on " << device;
  return out.str();
}

// The scope of a second run: takes what autograd wants to save.
class CheckpointFrame::Rerun : public HookScope {
 public:
  explicit Rerun(const CheckpointFrame& frame) : frame_(frame), num_wanted_(frame.slots_.size()) {
    if (!frame.options_.early_stop) return;
    while (num_wanted_ > 0 && !frame.slots_[num_wanted_ - 1].is_needed) --num_wanted_;
  }

  std::unique_ptr<SavedTensor> make() override;

  void take(const at::Tensor& tensor) {
    const auto number = values_.size();
    if (number < num_wanted_) {
      check_same(number, TensorDescription(tensor));
      values_.push_back(frame_.slots_[number].is_needed ? tensor : at::Tensor());
    } else if (!frame_.options_.early_stop && frame_.is_complete_) {
      throw_checkpoint_error(__LINE__, c10::str("checkpoint: the function saved more than ", num_wanted_,
                                                " tensors when it ran again in backward, but ", num_wanted_,
                                                " in forward", kDeterminismHint));
    }
    if (frame_.options_.early_stop && values_.size() == num_wanted_) throw EverythingComputed();
  }

  [[nodiscard]] std::vector<at::Tensor> finish() {
    if (values_.size() < num_wanted_) {
      throw_checkpoint_error(__LINE__, c10::str("checkpoint: the function saved ", values_.size(),
                                                " tensors when it ran again in backward, but at least ", num_wanted_,
                                                " in forward", kDeterminismHint));
    }
    return std::move(values_);
  }

 private:
  class Taken;

  void check_same(size_t number, const TensorDescription& again) const {
    const auto& before = frame_.slots_[number].description;
    if (!frame_.options_.determinism_check || before == again) return;
    throw_checkpoint_error(
        __LINE__,
        c10::str("checkpoint: the function computed something else when it ran again in backward: saved tensor ",
                 number + 1, " of ", frame_.slots_.size(), " was ", before.str(), " in forward and is ", again.str(),
                 " now", kDeterminismHint));
  }

  const CheckpointFrame& frame_;
  size_t num_wanted_;
  std::vector<at::Tensor> values_;
};

// The graph of the second run is never needed, unless the function itself runs a backward.
class CheckpointFrame::Rerun::Taken : public SavedTensor {
 public:
  explicit Taken(Rerun& rerun) : rerun_(rerun) {}

 private:
  void pack(const at::Tensor& tensor) override {
    tensor_ = tensor;
    rerun_.take(tensor);
  }
  at::Tensor unpack() override { return tensor_; }

  Rerun& rerun_;  // lives while anything is packed
  at::Tensor tensor_;
};

std::unique_ptr<SavedTensor> CheckpointFrame::Rerun::make() { return std::make_unique<Taken>(*this); }

CheckpointFrame::CheckpointFrame(const CheckpointOptions& options, ForwardState state, std::function<void()> run_again)
    : options_(options), state_(std::move(state)), run_again_(std::move(run_again)) {}

size_t CheckpointFrame::record(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  slots_.push_back({TensorDescription(tensor)});
  return slots_.size() - 1;
}

void CheckpointFrame::release(size_t number) {
  const std::lock_guard lock(mutex_);
  slots_[number].is_needed = false;
  for (auto& [task, values] : values_) {
    if (number < values.size()) values[number].reset();
  }
}

at::Tensor CheckpointFrame::value(size_t number) {
  const std::lock_guard lock(mutex_);
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == -1) return run().at(number);  // read outside of a backward
  auto found = values_.find(task);
  if (found == values_.end()) {
    found = values_.emplace(task, run()).first;
    forget_after(task);
  }
  auto value = std::exchange(found->second.at(number), at::Tensor());
  if (!value.defined()) {
    throw_checkpoint_error(
        __LINE__,
        "checkpoint: a saved tensor was unpacked twice in one backward. Hint: a custom autograd function calls "
        "get_saved_variables() once");
  }
  return value;
}

std::vector<at::Tensor> CheckpointFrame::run() {
  const ForwardState::Replay replay(state_);
  Rerun rerun(*this);
  try {
    run_again_();
  } catch (const EverythingComputed&) {  // NOLINT(bugprone-empty-catch): how most runs end
  }
  return rerun.finish();
}

// What this backward did not ask for goes with it.
void CheckpointFrame::forget_after(int graph_task) {
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), graph_task] {
    const auto self = weak.lock();
    if (!self) return;
    const std::lock_guard lock(self->mutex_);
    self->values_.erase(graph_task);
  });
}

}  // namespace fsdp::parallel
