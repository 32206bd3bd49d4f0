#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <fsdp/dtensor.h>
#include <fsdp/grad_scaler.h>

#include <cmath>
#include <map>

#include "mesh/reduce_numbers.h"
#include "train/module_entries.h"

namespace fsdp {
namespace {

void check_scale(double scale) {
  TORCH_CHECK_VALUE(std::isfinite(static_cast<float>(scale)) && scale > 0.0, "GradScaler: the scale is ", scale,
                    "; it must be positive and finite in float32");
}

void check_ranges(const GradScalerState& state) {
  check_scale(state.scale);
  TORCH_CHECK_VALUE(std::isfinite(state.growth_factor) && state.growth_factor > 1.0,
                    "GradScaler: the growth factor must be > 1, not ", state.growth_factor);
  TORCH_CHECK_VALUE(state.backoff_factor > 0.0 && state.backoff_factor < 1.0,
                    "GradScaler: the backoff factor must be between 0 and 1, not ", state.backoff_factor);
  TORCH_CHECK_VALUE(state.growth_interval >= 1, "GradScaler: the growth interval must be at least 1, not ",
                    state.growth_interval);
  TORCH_CHECK_VALUE(state.growth_tracker >= 0, "GradScaler: the growth tracker must not be negative, but is ",
                    state.growth_tracker);
}

// What to divide of a gradient: this rank's part, or the values of a sparse one.
at::Tensor values_of(const at::Tensor& grad) {
  const auto local = DTensor::is(grad) ? DTensor(grad).to_local() : grad;
  return local.is_sparse() ? local._values() : local;
}

std::vector<at::Tensor> gradients_of(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> grads;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      TORCH_CHECK_VALUE(parameter.grad().scalar_type() != at::kHalf,
                        "GradScaler: attempting to unscale FP16 gradients (of a parameter of shape ", parameter.sizes(),
                        "). Keep parameters in float32 and compute in float16 under autocast");
      grads.push_back(values_of(parameter.grad()));
    }
  }
  return grads;
}

// The kernel wants one device and dtype at a time.
bool unscale_and_find_inf(const std::vector<at::Tensor>& grads, double scale) {
  std::map<std::pair<std::string, at::ScalarType>, std::vector<at::Tensor>> by_kind;
  for (const auto& grad : grads) {
    if (grad.numel() > 0) by_kind[{grad.device().str(), grad.scalar_type()}].push_back(grad);
  }
  bool found_inf = false;
  for (const auto& [kind, tensors] : by_kind) {
    const auto options = tensors.front().options().dtype(at::kFloat);
    auto found = at::zeros({1}, options);
    at::_amp_foreach_non_finite_check_and_unscale_(tensors, found, at::full({1}, 1.0 / scale, options));
    found_inf = found.item<float>() != 0.0F || found_inf;
  }
  return found_inf;
}

// In the order of the parameters, which is the same on all ranks; also of parameters without a gradient here.
std::vector<DeviceMesh> meshes_of(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups())
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  return train::meshes_of(parameters);
}

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options)
    : enabled_(options.enabled),
      state_{options.init_scale, options.growth_factor, options.backoff_factor, options.growth_interval, 0} {
  if (enabled_) check_ranges(state_);
}

at::Tensor GradScaler::scale(const at::Tensor& loss) {
  if (!enabled_) return loss;
  has_scaled_ = true;
  return loss * state_.scale;
}

std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& losses) {
  std::vector<at::Tensor> scaled;
  for (const auto& loss : losses) scaled.push_back(scale(loss));
  return scaled;
}

void GradScaler::check_has_scaled(const char* caller) const {
  TORCH_CHECK(has_scaled_, "GradScaler::", caller, "() was called before scale(): the gradients would be divided by ",
              state_.scale, " without having been multiplied. Call scale(loss).backward()");
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!enabled_) return;
  check_has_scaled("unscale_");
  auto& progress = progress_[&optimizer];
  TORCH_CHECK(progress.stage != Stage::kUnscaled,
              "unscale_() has already been called on this optimizer since the last update()");
  TORCH_CHECK(progress.stage != Stage::kStepped, "unscale_() is being called after step()");
  const at::NoGradGuard no_grad;
  const auto grads = gradients_of(optimizer);
  progress.stage = Stage::kUnscaled;  // first: whatever fails below, the gradients are divided
  progress.has_gradients = !grads.empty();
  progress.found_inf = unscale_and_find_inf(grads, state_.scale);
  agree(progress, optimizer);
}

// A shard sees the infs of its own rows only.
void GradScaler::agree(Progress& progress, const torch::optim::Optimizer& optimizer) const {
  std::vector<double> largest{progress.found_inf ? 1.0 : 0.0, progress.has_gradients ? 1.0 : 0.0, state_.scale,
                              -state_.scale};
  for (const auto& mesh : meshes_of(optimizer)) {
    largest = reduce_numbers(largest, mesh, "agree whether all gradients are finite (GradScaler)", c10d::ReduceOp::MAX);
  }
  progress.found_inf = largest[0] > 0.0;
  progress.has_gradients = largest[1] > 0.0;
  TORCH_CHECK(largest[2] == -largest[3], "GradScaler: the scales of the ranks differ, from ", -largest[3], " to ",
              largest[2], " (here ", state_.scale, "). Give all ranks the same options and the same loaded state");
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!enabled_) {
    optimizer.step();
    return true;
  }
  check_has_scaled("step");
  auto& progress = progress_[&optimizer];
  TORCH_CHECK(progress.stage != Stage::kStepped, "step() has already been called since the last update()");
  if (progress.stage == Stage::kReady) unscale_(optimizer);
  TORCH_CHECK(progress.has_gradients,
              "No inf checks were recorded for this optimizer: none of its parameters has a gradient on any rank");
  if (!progress.found_inf) optimizer.step();
  progress.stage = Stage::kStepped;
  return !progress.found_inf;
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!enabled_) return;
  check_has_scaled("update");
  if (new_scale) {
    check_scale(*new_scale);
    state_.scale = *new_scale;
    progress_.clear();
    return;
  }
  bool has_checks = false, found_inf = false;
  for (const auto& [optimizer, progress] : progress_) {
    has_checks = has_checks || progress.has_gradients;
    found_inf = found_inf || progress.found_inf;
  }
  TORCH_CHECK(has_checks, "No inf checks were recorded prior to update: call step() or unscale_() first");
  auto scale = at::full({}, state_.scale, at::kFloat);
  auto tracker = at::full({}, state_.growth_tracker, at::kInt);
  at::_amp_update_scale_(scale, tracker, at::full({}, found_inf ? 1.0 : 0.0, at::kFloat), state_.growth_factor,
                         state_.backoff_factor, state_.growth_interval);
  state_.scale = scale.item<double>();
  state_.growth_tracker = tracker.item<int64_t>();
  progress_.clear();
}

void GradScaler::load_state(const GradScalerState& state) {
  if (!enabled_) return;
  TORCH_CHECK_VALUE(state.scale != 0.0, "GradScaler: the state is empty; was it saved from a disabled GradScaler?");
  check_ranges(state);
  state_ = state;
}

}  // namespace fsdp
