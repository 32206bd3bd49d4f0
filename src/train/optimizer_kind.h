#pragma once
// Reads and writes the state and options of one kind of torch::optim optimizer by name.
#include <fsdp/optimizer_state_dict.h>

namespace fsdp::train {

class OptimizerKind {
 public:
  using Values = OptimizerStateDict::Values;

  virtual ~OptimizerKind() = default;
  [[nodiscard]] virtual Values read_state(const torch::optim::OptimizerParamState& state) const = 0;
  // From values that passed complaint_about_state().
  [[nodiscard]] virtual std::unique_ptr<torch::optim::OptimizerParamState> make_state(const Values& values) const = 0;
  [[nodiscard]] virtual Values read_options(const torch::optim::OptimizerOptions& options) const = 0;
  virtual void write_options(torch::optim::OptimizerOptions& options, const Values& values) const = 0;

  // "" when the values are complete, of the right types and without unknown names. No values at all: no state yet,
  // which is a complaint for kinds that make the state with the optimizer.
  [[nodiscard]] virtual std::string complaint_about_state(const Values& values) const = 0;
  [[nodiscard]] virtual std::string complaint_about_options(const Values& values) const = 0;
};

// Errors: c10::NotImplementedError for an optimizer of no known kind.
[[nodiscard]] const OptimizerKind& kind_of(const torch::optim::Optimizer& optimizer);

}  // namespace fsdp::train
