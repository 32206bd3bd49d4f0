// The backward half of a group: whole gradients in, sharded gradients in flight out.
#include <ATen/record_function.h>
#include <fsdp/dtensor.h>

#include <cmath>

#include "comm/log.h"
#include "sharding/param_group.h"
#include "sharding/pending_reduction.h"
#include "sharding/runtime.h"

namespace fsdp::sharding {

using torch::autograd::variable_list;

namespace {

// `target` [num_ranks, shard_numel] <- `grad` cut into padded shards.
void cut_into_rows(const at::Tensor& target, const at::Tensor& grad, const SlotLayout& slot) {
  const auto num_ranks = target.size(0);
  if (slot.before > 1 || grad.numel() == target.numel()) {  // [before, ranks, chunk, after] -> [ranks, before, ...]
    const auto cut = grad.reshape({slot.before, num_ranks, slot.chunk, slot.after}).transpose(0, 1);
    target.view({num_ranks, slot.before, slot.chunk, slot.after}).copy_(cut);
    return;
  }
  const auto flat = grad.reshape({-1});
  for (int64_t r = 0; r < num_ranks; ++r) {
    const auto [begin, end] = slot.rows_of(r);
    const auto numel = (end - begin) * slot.after;
    auto row = target[r];
    if (numel > 0) row.narrow(0, 0, numel).copy_(flat.narrow(0, begin * slot.after, numel));
    if (numel < slot.shard_numel()) row.narrow(0, numel, slot.shard_numel() - numel).zero_();
  }
}

// The divisions before and after a sum that together divide by `factor`: fp16 could overflow if it were divided
// afterwards only.
std::pair<double, double> divisions(double factor, at::ScalarType dtype) {
  if (dtype != at::kHalf) return {1, factor};
  double before = 1;
  while (std::fmod(factor, before) == 0 && factor / before > before) before *= 2;
  return {before, factor / before};
}

}  // namespace

at::ScalarType ParamGroup::reduce_dtype(int index) const {
  const auto gathered = gather_layout_.slots[static_cast<size_t>(index)].dtype;
  return mp_policy_.reduce_dtype && at::isFloatingType(gathered) ? *mp_policy_.reduce_dtype : gathered;
}

variable_list ParamGroup::reduce(const std::vector<int>& indices, variable_list grads) {
  RECORD_FUNCTION("FSDP::reduce_scatter (" + name() + ")", c10::ArrayRef<const c10::IValue>{});
  if (comm::logs_debug()) comm::log_line(comm::LogLevel::kDebug, "reduce gradients of " + name());
  const dtensor::PlainScope plain;
  for (auto& grad : grads)
    if (grad.defined() && grad.is_sparse()) grad = grad.to_dense();
  variable_list reduced(indices.size());
  if (module_->reduction.requires_gradient_sync) {
    add_unsynced(indices, grads);
    for (const auto& places : places_by_dtype(indices)) reduce_places(indices, places, grads, reduced);
  } else {
    keep_unsynced(indices, grads);
  }
  drop_gather();
  if (module_->reshard_after_backward) reshard();
  return reduced;
}

// One collective for each dtype.
std::vector<ParamGroup::Places> ParamGroup::places_by_dtype(const std::vector<int>& indices) const {
  std::vector<std::pair<at::ScalarType, Places>> by_dtype;
  for (size_t k = 0; k < indices.size(); ++k) {
    const auto dtype = reduce_dtype(indices[k]);
    const auto found =
        std::find_if(by_dtype.begin(), by_dtype.end(), [dtype](const auto& entry) { return entry.first == dtype; });
    if (found == by_dtype.end())
      by_dtype.push_back({dtype, {k}});
    else
      found->second.push_back(k);
  }
  std::vector<Places> result;
  for (auto& [dtype, places] : by_dtype) result.push_back(std::move(places));
  return result;
}

void ParamGroup::keep_unsynced(const std::vector<int>& indices, variable_list& grads) {
  for (size_t k = 0; k < indices.size(); ++k) {
    if (!grads[k].defined()) continue;
    auto& slot = slots_[indices[k]];
    if (slot.unsynced.defined()) {
      slot.unsynced.add_(grads[k]);
      continue;
    }
    slot.unsynced = grads[k].to(reduce_dtype(indices[k]), /*non_blocking=*/false, /*copy=*/true);
    slot.unsynced_charge =
        dtensor::Charge(runtime_->ledger(), &MemoryStats::gradients, static_cast<int64_t>(slot.unsynced.nbytes()));
  }
}

void ParamGroup::add_unsynced(const std::vector<int>& indices, variable_list& grads) {
  for (size_t k = 0; k < indices.size(); ++k) {
    auto& slot = slots_[indices[k]];
    if (!slot.unsynced.defined()) continue;
    if (grads[k].defined()) slot.unsynced.add_(grads[k]);
    grads[k] = std::exchange(slot.unsynced, at::Tensor());
    slot.unsynced_charge = dtensor::Charge();
  }
}

void ParamGroup::reduce_places(const std::vector<int>& indices, const Places& places, variable_list& grads,
                               variable_list& reduced) {
  if (num_all_ranks() == 1) return keep_local(indices, places, grads, reduced);
  runtime_->make_room_for_reduction();
  auto plan = plan_reduction(indices, places, grads);
  const auto dtype = reduce_dtype(indices[places.front()]);
  const auto row_numel = plan.gradient_numel + plan.tail_numel();
  const auto num_bytes = num_ranks_ * row_numel * static_cast<int64_t>(c10::elementSize(dtype));
  auto block = runtime_->pool()->acquire(num_bytes, {runtime_->ledger(), &MemoryStats::buffers, num_bytes});
  const auto input = block.view(0, num_ranks_ * row_numel, dtype).view({num_ranks_, row_numel});
  const auto output = at::empty({row_numel}, input.options());
  fill_rows(plan, indices, places, grads, input);

  // An undefined gradient stays undefined: zeros would move unused parameters under weight decay.
  for (size_t i = 0; i < places.size(); ++i) {
    auto& parameter = plan.parameters[i];
    const auto& layout = layout_.slots[indices[places[i]]];
    if (!parameter.is_used || !plan.all_reduces) continue;
    const auto sizes = layout.shard_sizes(rank_);
    parameter.result = layout.dtype == dtype ? output.narrow(0, parameter.offset, parameter.numel).view(sizes)
                                             : at::empty(sizes, output.options().dtype(layout.dtype));
  }
  const bool all_reduces = plan.all_reduces;
  const auto pending = std::make_shared<PendingReduction>(std::move(plan), std::move(block), input.view({-1}), output);
  runtime_->ledger()->count(&MemoryStats::num_reduce_scatters);
  if (!all_reduces) return keep_partial(indices, places, *pending);
  runtime_->track(pending);
  for (size_t i = 0; i < places.size(); ++i)
    if (const auto& result = pending->result(i); result.defined())
      reduced[places[i]] = wrap_gradient(indices[places[i]], result, pending);
}

// What is known before a gradient is copied. Takes over what earlier backwards reduced over the shards only.
ReductionPlan ParamGroup::plan_reduction(const std::vector<int>& indices, const Places& places,
                                         const variable_list& grads) {
  const auto& own_settings = module_->reduction;
  const auto factor = own_settings.divide_factor.value_or(static_cast<double>(num_all_ranks()));
  const auto what = "gradients of " + name();
  std::vector<ReducedParameter> parameters(places.size());
  const bool all_reduces = own_settings.requires_all_reduce || !replicate_group_;
  int64_t offset = 0;
  for (size_t i = 0; i < places.size(); ++i) {
    auto& slot = slots_[indices[places[i]]];
    auto& parameter = parameters[i];
    parameter.path = slot.path;
    parameter.offset = offset;
    parameter.numel = slot.local.numel();
    if (all_reduces) parameter.partial = std::exchange(slot.partial, at::Tensor());
    parameter.is_used = grads[places[i]].defined() || parameter.partial.defined() || own_settings.reduce_unused;
    offset += layout_.slots[indices[places[i]]].shard_numel();
  }
  const auto dtype = reduce_dtype(indices[places.front()]);
  const auto [divide_before, divide_after] = divisions(factor, dtype);
  const auto num_bytes = offset * static_cast<int64_t>(c10::elementSize(dtype));
  const bool has_shards = num_ranks_ > 1;
  return {.shard_group = shard_group_,
          .replicate_group = replicate_group_,
          .all_reduces = all_reduces,
          .divide_before = divide_before,
          .divide_after = divide_after,
          .name = what,
          .parameters = std::move(parameters),
          .hook = own_settings.all_reduce_hook,
          .fingerprint = comm::Fingerprint::next(has_shards ? shard_group_ : replicate_group_,
                                                 has_shards ? "reduce_scatter" : "all_reduce", what, num_bytes),
          .gradient_numel = offset};
}

// `input` [num_ranks, row] <- the gradients, cut into rows; frees each before the next one is copied.
void ParamGroup::fill_rows(const ReductionPlan& plan, const std::vector<int>& indices, const Places& places,
                           variable_list& grads, const at::Tensor& input) const {
  for (size_t i = 0; i < places.size(); ++i) {
    const auto& layout = layout_.slots[indices[places[i]]];
    auto& grad = grads[places[i]];
    const auto rows = input.narrow(1, plan.parameters[i].offset, layout.shard_numel());
    if (grad.defined()) {
      cut_into_rows(rows, grad, layout);
      if (plan.divide_before != 1) rows.div_(plan.divide_before);
    } else {
      rows.zero_();
    }
    grad.reset();
  }
  input.narrow(1, plan.gradient_numel, plan.tail_numel()).copy_(at::tensor(plan.tail()));
}

// Reduced over the shards; the replicas come with a later backward.
void ParamGroup::keep_partial(const std::vector<int>& indices, const Places& places, PendingReduction& pending) {
  pending.wait();
  for (size_t i = 0; i < places.size(); ++i) {
    if (!pending.is_used(i)) continue;
    auto& slot = slots_[indices[places[i]]];
    if (slot.partial.defined())
      slot.partial.add_(pending.sum(i));
    else
      slot.partial = pending.sum(i).clone();
  }
}

// A single rank holds everything: nothing to communicate.
void ParamGroup::keep_local(const std::vector<int>& indices, const Places& places, variable_list& grads,
                            variable_list& reduced) {
  const auto& own_settings = module_->reduction;
  const auto hook = own_settings.all_reduce_hook;  // which may set another one
  for (const auto k : places) {
    const auto index = indices[k];
    const auto& layout = layout_.slots[index];
    if (!grads[k].defined() && !own_settings.reduce_unused) continue;
    auto own = std::exchange(grads[k], at::Tensor());
    own = own.defined() ? own.to(reduce_dtype(index)).contiguous()
                        : at::zeros(layout.sizes, slots_[index].local.options());
    // Autograd may give one tensor to two parameters, and others may hold it too.
    if (dtensor::has_wrapper_key(own) || own.use_count() > 1 || own.storage().use_count() > 1) own = own.clone();
    if (hook) hook(own.view({-1}));
    if (own_settings.divide_factor) own.div_(*own_settings.divide_factor);
    reduced[k] = wrap_gradient(index, own.to(layout.dtype), nullptr);
  }
}

at::Tensor ParamGroup::wrap_gradient(int index, at::Tensor local, std::shared_ptr<dtensor::Pending> pending) {
  const auto& slot = layout_.slots[index];
  auto state = std::make_shared<dtensor::ShardState>(mesh_, placements_of(static_cast<size_t>(index)), std::move(local),
                                                     "gradient of " + slots_[index].path);
  state->ledger = runtime_->ledger();
  state->charge = dtensor::Charge(runtime_->ledger(), &MemoryStats::gradients, slot.shard_bytes());
  auto handle = dtensor::make_handle(state, slot.sizes);
  state->set_pending(std::move(pending));
  return handle;
}

void ParamGroup::reduce_leftovers() {
  const auto& own_settings = module_->reduction;
  if (!own_settings.requires_gradient_sync) return;
  std::vector<int> indices;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const bool has_partial = slots_[i].partial.defined() && own_settings.requires_all_reduce;
    if (slots_[i].unsynced.defined() || has_partial) indices.push_back(static_cast<int>(i));
  }
  if (indices.empty()) return;
  runtime_->expect_reduction(*this, indices);
  const auto reduced = reduce(indices, variable_list(indices.size()));
  const at::NoGradGuard no_grad;
  for (size_t k = 0; k < indices.size(); ++k) {
    const at::Tensor parameter(slots_[indices[k]].parameter.lock());
    if (!parameter.defined() || !reduced[k].defined()) continue;
    auto& grad = parameter.mutable_grad();
    if (grad.defined())
      grad.add_(reduced[k]);
    else
      grad = reduced[k];
  }
}

void ParamGroup::drop_leftovers() {
  for (auto& slot : slots_) {
    slot.unsynced = slot.partial = at::Tensor();
    slot.unsynced_charge = dtensor::Charge();
  }
}

// Gradients are means over ranks of whole gradients, and what comes back here is the mean over ranks of the
// derivatives by the sharded mean: hand each rank the whole of it (docs/architecture.md, second derivatives).
variable_list ParamGroup::reduce_backward(const std::vector<int>& indices, const variable_list& grads) {
  const auto num_ranks = static_cast<double>(num_all_ranks());
  const auto scale = num_ranks / module_->reduction.divide_factor.value_or(num_ranks);
  variable_list whole(indices.size());
  for (size_t k = 0; k < indices.size(); ++k) {
    if (!grads[k].defined()) continue;
    whole[k] = DTensor(grads[k]).full_tensor().to(gather_layout_.slots[indices[k]].dtype);
    if (scale != 1) whole[k] = whole[k] * scale;
  }
  return whole;
}

}  // namespace fsdp::sharding
