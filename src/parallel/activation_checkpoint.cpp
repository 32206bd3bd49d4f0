#include <fsdp/activation_checkpoint.h>

#include "parallel/checkpoint_frame.h"

namespace fsdp::parallel {

namespace {

// A tensor of forward that is not kept.
class DroppedTensor : public SavedTensor {
 public:
  explicit DroppedTensor(std::shared_ptr<CheckpointFrame> frame) : frame_(std::move(frame)) {}
  ~DroppedTensor() override {
    if (number_) frame_->release(*number_);
  }

 private:
  void pack(const at::Tensor& tensor) override { number_ = frame_->record(tensor); }
  at::Tensor unpack() override { return frame_->value(*number_); }

  std::shared_ptr<CheckpointFrame> frame_;
  std::optional<size_t> number_;
};

}  // namespace

class CheckpointScope::Recording : public HookScope {
 public:
  explicit Recording(std::shared_ptr<CheckpointFrame> frame) : frame_(std::move(frame)) {}
  ~Recording() override { frame_->complete(); }
  std::unique_ptr<SavedTensor> make() override { return std::make_unique<DroppedTensor>(frame_); }

 private:
  std::shared_ptr<CheckpointFrame> frame_;
};

CheckpointScope::CheckpointScope(const CheckpointOptions& options, const std::vector<c10::Device>& devices,
                                 std::function<void()> run_again)
    : recording_(std::make_unique<Recording>(std::make_shared<CheckpointFrame>(
          options, ForwardState(options.preserve_rng_state, devices), std::move(run_again)))) {}

CheckpointScope::~CheckpointScope() = default;

bool records_graph() { return at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled(); }

// A tensor in the middle of a graph is kept without the graph: what the function does to it in place would otherwise
// make the checkpoint part of its own argument, and both would live for ever.
Kept<at::Tensor>::Kept(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  device_ = tensor.device();
  requires_grad_ = tensor.requires_grad();
  const bool is_parameter = requires_grad_ && tensor.is_leaf();
  saved_ = torch::autograd::SavedVariable(is_parameter ? tensor : tensor.detach(), /*is_output=*/false);
}

at::Tensor Kept<at::Tensor>::get() const {
  auto tensor = saved_.unpack();
  if (!requires_grad_ || tensor.requires_grad()) return tensor;
  tensor = tensor.detach();
  tensor.set_requires_grad(true);
  return tensor;
}

void Kept<at::Tensor>::add_devices(std::vector<c10::Device>& devices) const {
  if (device_) devices.push_back(*device_);
}

}  // namespace fsdp::parallel
