// The backward half of a group: whole gradients in, sharded gradients in flight out.
#include "dtensor/layout.h"
#include "sharding/param_group.h"
#include "sharding/pending_reduction.h"
#include "sharding/runtime.h"

namespace fsdp::sharding {

namespace {

// `target` [num_ranks, shard_numel] <- `grad` cut into padded shards.
void cut_into_rows(const at::Tensor& target, const at::Tensor& grad, const SlotLayout& slot) {
  const auto num_ranks = target.size(0);
  const auto flat = grad.reshape({-1});
  if (flat.numel() == target.numel()) {
    target.copy_(flat.view({num_ranks, slot.shard_numel()}));
    return;
  }
  for (int64_t r = 0; r < num_ranks; ++r) {
    const auto [begin, end] = own_rows(slot, r);
    const auto numel = (end - begin) * slot.row_numel;
    auto row = target[r];
    if (numel > 0) row.narrow(0, 0, numel).copy_(flat.narrow(0, begin * slot.row_numel, numel));
    if (numel < slot.shard_numel()) row.narrow(0, numel, slot.shard_numel() - numel).zero_();
  }
}

}  // namespace

torch::autograd::variable_list ParamGroup::reduce(const std::vector<int>& indices,
                                                  torch::autograd::variable_list grads) {
  const dtensor::PlainScope plain;
  for (auto& grad : grads)
    if (grad.defined() && grad.is_sparse()) grad = grad.to_dense();
  torch::autograd::variable_list reduced(indices.size());
  std::vector<bool> done(indices.size(), false);
  // One collective for each dtype.
  for (size_t first = 0; first < indices.size(); ++first) {
    if (done[first]) continue;
    std::vector<size_t> places;
    for (size_t k = first; k < indices.size(); ++k) {
      if (layout_.slots[indices[k]].dtype != layout_.slots[indices[first]].dtype) continue;
      places.push_back(k);
      done[k] = true;
    }
    reduce_dtype(indices, places, grads, reduced);
  }
  drop_gather();
  reshard();
  return reduced;
}

void ParamGroup::reduce_dtype(const std::vector<int>& indices, const std::vector<size_t>& places,
                              torch::autograd::variable_list& grads, torch::autograd::variable_list& reduced) {
  const auto dtype = layout_.slots[indices[places.front()]].dtype;
  ReductionPlan plan{shard_group_, replicate_group_, "gradients of " + name(), {}, {}};
  int64_t row_numel = static_cast<int64_t>(places.size());  // one flag a parameter, at the end
  for (const auto k : places) {
    row_numel += layout_.slots[indices[k]].shard_numel();
    plan.paths.push_back(slots_[indices[k]].path);
    plan.had_gradient.push_back(grads[k].defined());
  }
  if (plan.num_ranks() == 1) return keep_local(indices, places, grads, reduced);

  runtime_->make_room_for_reduction();
  const auto num_bytes = num_ranks_ * row_numel * static_cast<int64_t>(c10::elementSize(dtype));
  auto block = runtime_->pool()->acquire(num_bytes, {runtime_->ledger(), &MemoryStats::buffers, num_bytes});
  const auto input = block.view(0, num_ranks_ * row_numel, dtype).view({num_ranks_, row_numel});
  auto output = at::empty({row_numel}, input.options());
  auto flags = input.narrow(1, row_numel - static_cast<int64_t>(places.size()), static_cast<int64_t>(places.size()));
  int64_t offset = 0;
  for (size_t i = 0; i < places.size(); ++i) {
    const auto& slot = layout_.slots[indices[places[i]]];
    auto& grad = grads[places[i]];
    auto rows = input.narrow(1, offset, slot.shard_numel());
    if (grad.defined())
      cut_into_rows(rows, grad, slot);
    else
      rows.zero_();
    flags.narrow(1, static_cast<int64_t>(i), 1).fill_(grad.defined() ? 1 : 0);
    grad.reset();  // frees the whole gradient before the next one is copied
    offset += slot.shard_numel();
  }
  const auto had_gradient = plan.had_gradient;
  const auto pending = std::make_shared<PendingReduction>(std::move(plan), std::move(block), input.view({-1}), output);
  runtime_->track(pending);
  runtime_->ledger()->count(&MemoryStats::num_reduce_scatters);
  offset = 0;
  for (size_t i = 0; i < places.size(); ++i) {
    const auto index = indices[places[i]];
    const auto& slot = layout_.slots[index];
    const auto [begin, end] = own_rows(slot, rank_);
    auto sizes = slot.sizes;
    sizes[0] = end - begin;
    // An undefined gradient stays undefined: zeros would move unused parameters under weight decay.
    if (had_gradient[i]) {
      auto local = output.narrow(0, offset, (end - begin) * slot.row_numel).view(sizes);
      reduced[places[i]] = wrap_gradient(index, std::move(local), pending);
    }
    offset += slot.shard_numel();
  }
}

// A single rank holds everything: nothing to reduce.
void ParamGroup::keep_local(const std::vector<int>& indices, const std::vector<size_t>& places,
                            torch::autograd::variable_list& grads, torch::autograd::variable_list& reduced) {
  for (const auto k : places) {
    if (!grads[k].defined()) continue;
    auto own = grads[k].contiguous();
    if (dtensor::has_wrapper_key(own)) own = own.clone();
    reduced[k] = wrap_gradient(indices[k], std::move(own), nullptr);
  }
}

at::Tensor ParamGroup::wrap_gradient(int index, at::Tensor local, std::shared_ptr<dtensor::Pending> pending) {
  const auto& slot = layout_.slots[index];
  auto state =
      std::make_shared<dtensor::ShardState>(mesh_, placements_, std::move(local), "gradient of " + slots_[index].path);
  state->ledger = runtime_->ledger();
  state->charge = dtensor::Charge(runtime_->ledger(), &MemoryStats::gradients, slot.shard_bytes());
  auto handle = dtensor::make_handle(state, slot.sizes);
  state->set_pending(std::move(pending));
  return handle;
}

}  // namespace fsdp::sharding
