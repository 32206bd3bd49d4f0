#include "dtensor/whole_state.h"

namespace fsdp::dtensor {

namespace {

constexpr std::string_view kGradientOf = "gradient of ";

// "layers.0.weight" when `tensor` is this parameter, its gradient, or computed from its gradient; "" otherwise.
std::string updated_parameter(const at::Tensor& tensor) {
  const auto* state = state_of(tensor);
  if (!state) return "";
  if (state->owner) return state->path;
  const auto place = state->path.find(kGradientOf);
  return place == std::string::npos ? "" : state->path.substr(place + kGradientOf.size());
}

bool is_whole_beside(const at::Tensor& tensor, const at::Tensor& sharded) {
  return !has_wrapper_key(tensor) && tensor.dim() > 0 && tensor.sizes() == sharded.sizes();
}

}  // namespace

void refuse_whole_state(Call& call) {
  const auto self = call.tensor(0);
  const auto numerator = call.tensor(1);
  const auto denominator = call.tensor(2);
  auto path = updated_parameter(self);
  if (path.empty()) path = updated_parameter(numerator);
  if (path.empty()) return;
  const bool is_whole =
      is_whole_beside(denominator, self) || (state_of(denominator) && is_whole_beside(self, denominator));
  TORCH_CHECK(!is_whole, "the optimizer state of the sharded parameter '", path,
              "' is whole on every rank: it was made before fully_shard, or loaded from a plain file. Call "
              "fsdp::shard_optimizer_state(module, optimizer) before step()");
}

void warn_of_whole_sum(const at::Tensor& sum, const at::Tensor& term) {
  const auto* state = state_of(term);
  if (!state || state->owner || !is_whole_beside(sum, term)) return;
  const auto path = updated_parameter(term);
  if (path.empty() || !state->ledger || !state->ledger->is_first_mention(path)) return;
  TORCH_WARN(
      "the sharded gradient of '", path,
      "' is added to a whole tensor, which stays whole on every rank. Optimizer state from before fully_shard or "
      "from a plain file: call fsdp::shard_optimizer_state(module, optimizer). Said once a parameter");
}

}  // namespace fsdp::dtensor
