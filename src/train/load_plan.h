#pragma once
// How every load begins: the ranks find out what fits and agree on it, before any value moves.
#include <fsdp/state_dict.h>

#include <functional>
#include <optional>

#include "train/module_entries.h"

namespace fsdp::train {

// Plan::complaint() is what does not fit, or "".
template <class Plan>
struct PlanMaking {
  std::function<Plan()> from_own;                     // on a rank that was given values
  std::function<std::string(const Plan&)> to_text;    // with broadcast_from_rank0: what the first rank tells
  std::function<Plan(const std::string&)> from_text;  // the others, who look for it in their own module
};

// Whether this rank was given the values to load.
[[nodiscard]] inline bool has_values_to_load(const std::vector<DeviceMesh>& meshes, bool from_rank0) {
  return !from_rank0 || is_first_rank(meshes);
}

// Collective. `title`: the function, for messages. Errors, on every rank: c10::ValueError with what does not fit on one
// of them, or when there is no mesh to broadcast over; c10::NotImplementedError of check_one_first_rank().
template <class Plan>
[[nodiscard]] Plan agree_on_plan(const std::string& title, const std::vector<DeviceMesh>& meshes, bool from_rank0,
                                 const PlanMaking<Plan>& make) {
  TORCH_CHECK_VALUE(!from_rank0 || !meshes.empty(), title,
                    ": broadcast_from_rank0 needs a module that fully_shard or replicate wrapped: it says over which "
                    "ranks. Hint: load a plain module, or one in a DistributedDataParallel, on every rank; weights may "
                    "be loaded on rank 0 alone before a DistributedDataParallel wraps them, which starts from those");
  if (from_rank0) check_one_first_rank(meshes, title);
  const bool has_values = has_values_to_load(meshes, from_rank0);
  std::optional<Plan> plan;
  if (has_values) plan.emplace(make.from_own());
  auto complaint = any_complaint(meshes, title, plan ? plan->complaint() : "");
  if (complaint.empty() && from_rank0) {
    const auto text = text_of_first_rank(meshes, "what to load, " + title, has_values ? make.to_text(*plan) : "");
    if (!has_values) plan.emplace(make.from_text(text));
    complaint = any_complaint(meshes, "places to load to, " + title, plan->complaint());
  }
  TORCH_CHECK_VALUE(complaint.empty(), title, ": ", complaint,
                    ". Nothing was loaded; strict = false skips missing and unexpected names");
  return *std::move(plan);
}

}  // namespace fsdp::train
