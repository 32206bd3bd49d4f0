// Loading optimizer state: first every rank finds out what fits and all agree, then values move.
#include <fsdp/optimizer_state_dict.h>
#include <torch/serialize.h>

#include "dtensor/shard_state.h"
#include "train/load_plan.h"
#include "train/move_values.h"
#include "train/optimizer_load_plan.h"

namespace fsdp {

namespace {

c10::impl::GenericDict dict_of_values(const OptimizerStateDict::Values& values) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  for (const auto& item : values) {
    const bool is_tensor = item.value().isTensor();
    // Of a tensor the others need the dtype only; its values follow by themselves.
    dict.insert(item.key(), is_tensor ? at::empty({0}, item.value().toTensor().scalar_type()) : item.value());
  }
  return dict;
}

OptimizerStateDict::Values values_of_dict(const c10::IValue& dict) {
  OptimizerStateDict::Values values;
  for (const auto& item : dict.toGenericDict()) values.insert(item.key().toStringRef(), item.value());
  return values;
}

// Everything but the values of tensors, as bytes.
std::string skeleton_of(const OptimizerStateDict& dict) {
  c10::impl::GenericDict state(c10::StringType::get(), c10::AnyType::get());
  for (const auto& item : dict.state) state.insert(item.key(), dict_of_values(item.value()));
  c10::impl::GenericList groups(c10::AnyType::get());
  for (const auto& group : dict.param_groups)
    groups.push_back(c10::ivalue::Tuple::create(c10::List<std::string>(group.params), dict_of_values(group.options)));
  const auto bytes = torch::pickle_save(c10::ivalue::Tuple::create(state, groups));
  return {bytes.begin(), bytes.end()};
}

OptimizerStateDict dict_of_skeleton(const std::string& bytes) {
  const auto read = torch::pickle_load({bytes.begin(), bytes.end()});
  const auto& parts = read.toTupleRef().elements();
  OptimizerStateDict dict;
  for (const auto& item : parts[0].toGenericDict())
    dict.state.insert(item.key().toStringRef(), values_of_dict(item.value()));
  for (const auto& group : parts[1].toListRef()) {
    auto& made = dict.param_groups.emplace_back();
    for (const auto& name : group.toTupleRef().elements()[0].toListRef()) made.params.push_back(name.toStringRef());
    made.options = values_of_dict(group.toTupleRef().elements()[1]);
  }
  return dict;
}

// The tensor that is to hold a state of `parameter`: `existing` where it fits, so that aliases stay alive.
at::Tensor place_for_state(const c10::IValue* existing, const train::NamedState& target, const std::string& key,
                           at::ScalarType dtype) {
  const auto& parameter = target.parameter;
  const auto* layout = dtensor::state_of(parameter);
  if (existing && existing->toTensor().scalar_type() == dtype && existing->toTensor().sizes() == parameter.sizes()) {
    const auto* state = dtensor::state_of(existing->toTensor());
    const bool fits = layout ? state && state->placements == layout->placements && state->mesh == layout->mesh : !state;
    if (fits) return existing->toTensor();
  }
  const dtensor::PlainScope plain;
  if (!layout) return at::zeros_like(parameter, parameter.options().dtype(dtype).requires_grad(false));
  const auto& local = dtensor::state_of(parameter)->local();
  return dtensor::make_like(*layout, parameter.sizes(), at::zeros_like(local, local.options().dtype(dtype)),
                            key + " of " + target.name);
}

// From rank 0's values when `sent`; `values` are stand-ins elsewhere then.
void load_state_of(torch::optim::Optimizer& optimizer, const train::OptimizerLoadPlan::Item& item,
                   const train::OptimizerNames& names, bool sent) {
  const auto& kind = train::kind_of(optimizer);
  const auto& [target, values] = item;
  const auto* old = train::state_for(optimizer, target.parameter);
  const auto existing = old ? kind.read_state(*old) : OptimizerStateDict::Values();
  const bool has_value = train::has_values_to_load(names.meshes(), sent);
  OptimizerStateDict::Values next;
  for (const auto& given : *values) {
    if (!given.value().isTensor()) {
      next.insert(given.key(), given.value());
      continue;
    }
    const auto& value = given.value().toTensor();
    const auto place = place_for_state(existing.find(given.key()), target, given.key(), value.scalar_type());
    if (sent) {
      const auto what = given.key() + " of " + target.name;
      train::send_value(place, has_value ? value : at::Tensor(), names.meshes().front(), what);
    } else {
      train::copy_value(place, value);
    }
    next.insert(given.key(), place);
  }
  auto* const key = target.parameter.unsafeGetTensorImpl();
  if (next.is_empty())
    optimizer.state().erase(key);
  else
    optimizer.state()[key] = kind.make_state(next);
}

}  // namespace

void load_optimizer_state_dict(const torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                               const OptimizerStateDict& dict, const LoadStateDictOptions& options) {
  using Plan = train::OptimizerLoadPlan;
  const std::string title = "load_optimizer_state_dict";
  const train::OptimizerNames names(module, optimizer);
  train::check_off_meta(train::entries_of(module), title);
  const auto& kind = train::kind_of(optimizer);
  const auto& meshes = names.meshes();
  const bool from_rank0 = options.broadcast_from_rank0;
  OptimizerStateDict received;  // the plan refers to it
  const auto plan_of = [&](const OptimizerStateDict& given, bool has_tensors) {
    return Plan(names, kind, given, {options.strict, /*whole_only=*/from_rank0, has_tensors});
  };
  const auto from_text = [&](const std::string& bytes) {
    received = dict_of_skeleton(bytes);
    return plan_of(received, /*has_tensors=*/false);
  };
  const auto plan = train::agree_on_plan<Plan>(title, meshes, from_rank0,
                                               {.from_own = [&] { return plan_of(dict, /*has_tensors=*/true); },
                                                .to_text = [&](const Plan&) { return skeleton_of(dict); },
                                                .from_text = from_text});
  for (const auto& item : plan.items()) load_state_of(optimizer, item, names, from_rank0);
  for (size_t g = 0; g < plan.options().size(); ++g)
    if (const auto* given = plan.options()[g]) kind.write_options(optimizer.param_groups()[g].options(), *given);
}

}  // namespace fsdp
