#include <fsdp/dtensor.h>
#include <fsdp/optimizer_state_dict.h>

#include "dtensor/layout.h"
#include "dtensor/rank0.h"
#include "train/optimizer_kind.h"
#include "train/optimizer_names.h"

namespace fsdp {

namespace {

using StateValues = OptimizerStateDict::Values;

// All states and options, with `take(name, key, tensor)` in the place of each state tensor.
template <class Take>
OptimizerStateDict collect_optimizer_state(const train::OptimizerNames& names, const torch::optim::Optimizer& optimizer,
                                           const Take& take) {
  const auto& kind = train::kind_of(optimizer);
  OptimizerStateDict dict;
  for (size_t g = 0; g < names.groups().size(); ++g) {
    auto& group = dict.param_groups.emplace_back();
    group.options = kind.read_options(optimizer.param_groups()[g].options());
    for (const auto& [name, parameter] : names.groups()[g]) {
      group.params.push_back(name);
      const auto* state = train::state_for(optimizer, parameter);
      auto values = state ? kind.read_state(*state) : StateValues();
      for (auto& item : values)
        if (item.value().isTensor()) item.value() = take(name, item.key(), item.value().toTensor());
      dict.state.insert(name, std::move(values));
    }
  }
  return dict;
}

bool is_whole_state_of_shard(const at::Tensor& tensor, const at::Tensor& parameter) {
  return DTensor::is(parameter) && !DTensor::is(tensor);
}

}  // namespace

OptimizerStateDict optimizer_state_dict(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer) {
  const train::OptimizerNames names(module, optimizer);
  return collect_optimizer_state(names, optimizer, [](const auto&, const auto&, const at::Tensor& tensor) {
    return c10::IValue(tensor.detach());
  });
}

OptimizerStateDict full_optimizer_state_dict(const torch::nn::Module& module,
                                             const torch::optim::Optimizer& optimizer) {
  const train::OptimizerNames names(module, optimizer);
  train::check_one_first_rank(names.meshes(), "full_optimizer_state_dict");
  const bool collects = train::is_first_rank(names.meshes());
  auto dict = collect_optimizer_state(
      names, optimizer, [&](const std::string& name, const std::string& key, const at::Tensor& tensor) -> c10::IValue {
        auto* state = dtensor::state_of(tensor);
        if (!state) return collects ? tensor.detach().clone().cpu() : at::Tensor();
        (void)train::any_complaint({state->mesh}, c10::str("full_optimizer_state_dict, '", key, "' of ", name), "");
        const auto whole = dtensor::gather_to_first_rank(*state, tensor.sizes());
        return collects ? whole.cpu() : at::Tensor();
      });
  return collects ? dict : OptimizerStateDict();
}

void shard_optimizer_state(const torch::nn::Module& module, torch::optim::Optimizer& optimizer) {
  const train::OptimizerNames names(module, optimizer);
  const auto& kind = train::kind_of(optimizer);
  std::vector<std::string> misfits;
  const auto for_each_state = [&](const auto& visit) {
    for (const auto& group : names.groups())
      for (const auto& [name, parameter] : group)
        if (const auto* state = train::state_for(optimizer, parameter)) visit(name, parameter, kind.read_state(*state));
  };
  for_each_state([&](const std::string& name, const at::Tensor& parameter, const StateValues& values) {
    for (const auto& item : values) {
      if (!item.value().isTensor() || !is_whole_state_of_shard(item.value().toTensor(), parameter)) continue;
      const auto& sizes = item.value().toTensor().sizes();
      if (sizes != parameter.sizes())
        misfits.push_back(
            c10::str("'", item.key(), "' of ", name, " is ", sizes, ", the parameter ", parameter.sizes()));
    }
  });
  TORCH_CHECK_VALUE(misfits.empty(), "shard_optimizer_state: ", train::listed(misfits),
                    ": this is the state of another model");

  const dtensor::PlainScope plain;
  for_each_state([&](const std::string& name, const at::Tensor& parameter, StateValues values) {
    for (auto& item : values) {
      if (!item.value().isTensor() || !is_whole_state_of_shard(item.value().toTensor(), parameter)) continue;
      const auto& layout = *dtensor::state_of(parameter);
      const auto own =
          dtensor::own_part(item.value().toTensor().detach(), parameter.sizes(), layout.mesh, layout.placements);
      item.value() = dtensor::make_like(layout, parameter.sizes(), own.clone(at::MemoryFormat::Contiguous),
                                        item.key() + " of " + name);
    }
    optimizer.state()[parameter.unsafeGetTensorImpl()] = kind.make_state(values);
  });
}

}  // namespace fsdp
