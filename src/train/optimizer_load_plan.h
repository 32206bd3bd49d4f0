#pragma once
// Which given optimizer states and options belong to which parameter and group, and what does not fit.
#include "train/optimizer_kind.h"
#include "train/optimizer_names.h"

namespace fsdp::train {

// Refers to what it was made from.
class OptimizerLoadPlan {
 public:
  using Values = OptimizerStateDict::Values;
  struct Item {
    NamedState target;
    const Values* values;
  };
  struct Rules {
    bool strict = true;
    bool whole_only = false;  // DTensors are complaints
    bool has_tensors = true;  // false: the tensors in the dict are stand-ins
  };

  OptimizerLoadPlan(const OptimizerNames& names, const OptimizerKind& kind, const OptimizerStateDict& dict,
                    const Rules& rules);

  [[nodiscard]] std::string complaint() const { return listed(complaints_); }
  [[nodiscard]] const std::vector<Item>& items() const { return items_; }
  // One entry a group of the optimizer; null when the dict knows none of its parameters.
  [[nodiscard]] const std::vector<const Values*>& options() const { return options_; }

 private:
  void match_states(const OptimizerStateDict& dict);
  void check_values(const NamedState& target, const Values& values);
  void match_groups(const OptimizerStateDict& dict);

  const OptimizerNames& names_;
  const OptimizerKind& kind_;
  Rules rules_;
  std::vector<Item> items_;
  std::vector<const Values*> options_;
  std::vector<std::string> complaints_;
};

}  // namespace fsdp::train
