#include <fsdp/loss.h>

#include "mesh/reduce_numbers.h"

namespace fsdp {
namespace {

// `function`: as users write it. `fault` is what this rank did wrong, or "". It travels with the count, so that all
// ranks fail alike.
double token_weight_or_error(const char* function, int64_t num_tokens, std::string fault, const DeviceMesh& mesh) {
  if (fault.empty() && num_tokens < 0) fault = c10::str("num_tokens is ", num_tokens, ", which is negative");
  const double faults = fault.empty() ? 0.0 : 1.0;
  const auto sums = reduce_numbers({static_cast<double>(num_tokens), faults}, mesh,
                                   c10::str("count the tokens of all ranks (", function, ")"), c10d::ReduceOp::SUM);
  TORCH_CHECK_VALUE(fault.empty(), function, ": ", fault);
  TORCH_CHECK_VALUE(sums[1] == 0.0, function, ": ", sums[1], " other ranks gave a wrong loss or number of tokens");
  return sums[0] == 0.0 ? 0.0 : static_cast<double>(mesh.size()) / sums[0];
}

std::string fault_of(const at::Tensor& loss_sum) {
  if (!loss_sum.defined()) return "loss_sum is undefined";
  if (loss_sum.numel() == 1 && at::isFloatingType(loss_sum.scalar_type())) return "";
  return c10::str("loss_sum is ", loss_sum.scalar_type(), " of shape ", loss_sum.sizes(),
                  "; needed is one floating number, the sum over this rank's tokens");
}

}  // namespace

double token_mean(const at::Tensor& loss_sum, int64_t num_tokens, const DeviceMesh& mesh) {
  const auto fault = fault_of(loss_sum);
  const double weight = token_weight_or_error("token_mean", num_tokens, fault, mesh);
  const double own = loss_sum.detach().item<double>() * weight / static_cast<double>(mesh.size());
  return reduce_numbers({own}, mesh, "add up the loss of all ranks (token_mean)", c10d::ReduceOp::SUM).front();
}

double token_weight(int64_t num_tokens, const DeviceMesh& mesh) {
  return token_weight_or_error("token_weight", num_tokens, "", mesh);
}

at::Tensor mean_over_ranks(const at::Tensor& loss_sum, int64_t num_tokens, const DeviceMesh& mesh) {
  const double weight = token_weight_or_error("mean_over_ranks", num_tokens, fault_of(loss_sum), mesh);
  return loss_sum * weight;
}

at::Tensor mean_over_ranks(const at::Tensor& loss_sum, int64_t num_tokens, const ProcessGroup& group) {
  const auto device = loss_sum.defined() ? loss_sum.device().type() : c10::kCPU;
  return mean_over_ranks(loss_sum, num_tokens, DeviceMesh::from_group(group, device));
}

}  // namespace fsdp
