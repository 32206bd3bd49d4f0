#pragma once
// Whole tensors that take part in the update of a sharded parameter: optimizer state made before fully_shard or loaded
// from a plain file. The values come out right, but every rank keeps all of it.
#include "dtensor/call.h"

namespace fsdp::dtensor {

// For aten::addcdiv_(self, numerator, denominator), which Adam, AdamW, RMSprop and Adagrad end in: the denominator
// comes from the state. Errors: c10::Error naming the parameter.
void refuse_whole_state(Call& call);

// For `sum` += `term`, as SGD's momentum does it. Adding a gradient to a whole tensor may be meant, so this only warns,
// once a parameter.
void warn_of_whole_sum(const at::Tensor& sum, const at::Tensor& term);

}  // namespace fsdp::dtensor
