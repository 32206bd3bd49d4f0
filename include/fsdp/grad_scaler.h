#pragma once
// Loss scaling for training in half precision: small gradients survive, and a step with overflowed gradients is
// skipped.
//
//   fsdp::GradScaler scaler;
//   ...
//   scaler.scale(loss).backward();
//   scaler.unscale_(optimizer);                                          // only to clip or look at true gradients
//   torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
//   scaler.step(optimizer);                                              // all ranks step, or all skip
//   scaler.update();
//   optimizer.zero_grad();
//
// PyTorch: torch.amp.GradScaler; ShardedGradScaler for what is sharded.
#include <fsdp/version.h>
#include <torch/optim/optimizer.h>

#include <optional>
#include <unordered_map>
#include <vector>

namespace fsdp {

struct GradScalerOptions {
  double init_scale = 65536.0;
  double growth_factor = 2.0;      // above 1
  double backoff_factor = 0.5;     // between 0 and 1
  int64_t growth_interval = 2000;  // steps without inf or NaN before the scale grows
  bool enabled = true;             // false: scale() and step() pass through, the rest does nothing
};

// What a checkpoint keeps of a GradScaler. Of a disabled one: all zero.
struct GradScalerState {
  double scale = 0.0;
  double growth_factor = 0.0;
  double backoff_factor = 0.0;
  int64_t growth_interval = 0;
  int64_t growth_tracker = 0;  // steps without inf or NaN since the scale last changed
};

// Gradients may be plain or sharded, also both in one optimizer. Every rank of a mesh makes the same calls.
class GradScaler {
 public:
  // Errors: c10::ValueError for an option outside its range.
  explicit GradScaler(const GradScalerOptions& options = {});

  // loss * get_scale(), of the loss's shape and dtype.
  [[nodiscard]] at::Tensor scale(const at::Tensor& loss);
  [[nodiscard]] std::vector<at::Tensor> scale(const std::vector<at::Tensor>& losses);

  // Divides the gradients of the optimizer's parameters by the scale, in place, and notes whether one of them holds an
  // inf or NaN on any rank. Once an optimizer between two update(); step() does it when it was not called. Collective
  // over the meshes of sharded parameters: one all-reduce of four numbers a mesh dim.
  // Errors: c10::Error when called twice, after step(), before any scale(), or when the scales of the ranks differ;
  // c10::ValueError for a gradient in float16; c10::DistError when ranks do not come.
  void unscale_(torch::optim::Optimizer& optimizer);

  // optimizer.step(), unless a rank found an inf or NaN. Returns whether it stepped, which is the same on all ranks.
  // Optimizers that need a closure are not supported. Errors: those of unscale_(), and c10::Error when called twice
  // since the last update() or when no parameter has a gradient on any rank.
  bool step(torch::optim::Optimizer& optimizer);

  // Ends the iteration: backs the scale off when an optimizer's step was skipped, or lets it grow after
  // growth_interval steps. With `new_scale`: takes that one. Errors: c10::Error when no optimizer was checked since
  // the last update(); c10::ValueError for a new scale that is not positive and finite.
  void update(std::optional<double> new_scale = std::nullopt);

  [[nodiscard]] double get_scale() const { return enabled_ ? state_.scale : 1.0; }
  [[nodiscard]] bool is_enabled() const { return enabled_; }

  // PyTorch: state_dict, load_state_dict. A disabled scaler ignores what it loads. Errors: c10::ValueError for values
  // outside their range, so for the state of a disabled scaler.
  [[nodiscard]] GradScalerState state() const { return enabled_ ? state_ : GradScalerState{}; }
  void load_state(const GradScalerState& state);

 private:
  enum class Stage { kReady, kUnscaled, kStepped };
  struct Progress {
    Stage stage = Stage::kReady;
    bool has_gradients = false;  // on any rank
    bool found_inf = false;      // on any rank
  };
  void agree(Progress& progress, const torch::optim::Optimizer& optimizer) const;
  void check_has_scaled(const char* caller) const;

  bool enabled_;
  bool has_scaled_ = false;
  GradScalerState state_;
  std::unordered_map<const torch::optim::Optimizer*, Progress> progress_;  // since the last update()
};

}  // namespace fsdp
