#include "sharding/pending_reduction.h"

namespace fsdp::sharding {

PendingReduction::PendingReduction(ReductionPlan plan, Block input, const at::Tensor& input_view, at::Tensor output)
    : plan_(std::move(plan)), input_(std::move(input)), output_(std::move(output)) {
  work_ = comm::reduce_scatter(output_, input_view, plan_.shard_group, plan_.name);
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

void PendingReduction::finish() {
  const dtensor::PlainScope plain;
  work_.wait();
  work_ = {};
  input_.reset();
  if (plan_.replicate_group && plan_.replicate_group->getSize() > 1)
    comm::all_reduce({output_}, plan_.replicate_group, plan_.name).front().wait();
  check_flags();
  output_.div_(plan_.num_ranks());
}

// A parameter that some ranks used and others did not would get a wrong mean.
void PendingReduction::check_flags() const {
  const auto num_params = static_cast<int64_t>(plan_.paths.size());
  const auto counts = output_.narrow(0, output_.numel() - num_params, num_params).to(at::kCPU, at::kDouble);
  const auto* count = counts.const_data_ptr<double>();
  for (int64_t i = 0; i < num_params; ++i) {
    if (count[i] == 0 || count[i] == static_cast<double>(plan_.num_ranks())) continue;
    TORCH_CHECK(false, "parameter '", plan_.paths[i], "' got a gradient on ", static_cast<int64_t>(count[i]), " of ",
                plan_.num_ranks(), " ranks (this rank: ", plan_.had_gradient[i] ? "yes" : "no",
                "): every rank must use the same parameters in a step. Add 0 * parameter.sum() to the loss where it is "
                "not used");
  }
}

}  // namespace fsdp::sharding
