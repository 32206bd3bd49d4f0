#include "sharding/pending_reduction.h"

namespace fsdp::sharding {

std::vector<float> ReductionPlan::tail() const {
  std::vector<float> values;
  const auto add = [&values](bool x) { values.insert(values.end(), {x ? 1.0F : 0.0F, x ? 0.0F : 1.0F}); };
  for (const auto& parameter : parameters) add(parameter.is_used);
  for (int64_t bit = 0; bit < kDigestBits; ++bit) add((fingerprint.digest() >> bit & 1U) != 0);
  return values;
}

PendingReduction::PendingReduction(ReductionPlan plan, Block input, const at::Tensor& input_view, at::Tensor output)
    : plan_(std::move(plan)), input_(std::move(input)), output_(std::move(output)) {
  if (has_shards()) {
    work_ = comm::reduce_scatter(output_, input_view, plan_.shard_group, plan_.name);
    return;
  }
  output_.copy_(input_view);
  input_.reset();
  start_all_reduce();  // nothing to wait for: it flies while backward goes on
}

void PendingReduction::start_all_reduce() {
  for (size_t i = 0; i < plan_.parameters.size(); ++i)
    if (const auto& partial = plan_.parameters[i].partial; partial.defined()) sum(i).add_(partial.view({-1}));
  if (plan_.all_reduces && plan_.replicate_group && plan_.replicate_group->getSize() > 1)
    work_ = std::move(comm::all_reduce({output_}, plan_.replicate_group, plan_.name).front());
}

void PendingReduction::wait() {
  if (done_) return;
  if (error_) std::rethrow_exception(error_);
  try {
    finish();
  } catch (...) {
    error_ = std::current_exception();  // every reader learns it, and nobody gets half a gradient
    throw;
  }
  done_ = true;
}

at::Tensor PendingReduction::sum(size_t i) const {
  const auto& parameter = plan_.parameters[i];
  return output_.narrow(0, parameter.offset, parameter.numel);
}

void PendingReduction::finish() {
  const auto gradients = output_.narrow(0, 0, plan_.gradient_numel);
  {
    const dtensor::PlainScope plain;
    work_.wait();
    work_ = {};
    input_.reset();
    if (has_shards()) {
      start_all_reduce();
      work_.wait();
      work_ = {};
    }
    check_tail();
  }
  if (!plan_.all_reduces) return;
  if (plan_.hook) plan_.hook(gradients);
  const dtensor::PlainScope plain;
  if (plan_.divide_after != 1) gradients.div_(plan_.divide_after);
  for (size_t i = 0; i < plan_.parameters.size(); ++i) {
    const auto& result = plan_.parameters[i].result;
    if (result.defined() && result.scalar_type() != output_.scalar_type()) result.copy_(sum(i).view(result.sizes()));
  }
}

void PendingReduction::check_tail() const {
  const auto tail = output_.narrow(0, plan_.gradient_numel, plan_.tail_numel()).to(at::kCPU, at::kDouble);
  const auto* pair = tail.const_data_ptr<double>();
  const auto differs = [pair](size_t i) { return pair[2 * i] > 0 && pair[2 * i + 1] > 0; };
  const auto num_params = plan_.parameters.size();
  for (size_t bit = 0; bit < ReductionPlan::kDigestBits; ++bit)
    if (differs(num_params + bit))
      plan_.fingerprint.fail(has_shards() ? plan_.shard_group : plan_.replicate_group,
                             "another rank reduces the gradients of another group");
  for (size_t i = 0; i < num_params; ++i)
    if (differs(i)) fail_unequal_use(plan_.parameters[i]);
}

// A parameter that some ranks used and others did not would get a wrong mean.
void PendingReduction::fail_unequal_use(const ReducedParameter& parameter) const {
  TORCH_CHECK(false, "parameter '", parameter.path,
              "' got a gradient on some ranks only (this rank: ", parameter.is_used ? "yes" : "no",
              "): every rank must use the same parameters in a step. Add 0 * parameter.sum() to the loss where it is "
              "not used, or count it as zeros there with FSDPModule::set_reduce_scatter_unused_params(true)");
}

}  // namespace fsdp::sharding
