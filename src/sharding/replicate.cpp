#include <fsdp/replicate.h>

#include "sharding/wrap.h"

namespace fsdp {
namespace {

// Every parameter is one of those that fully_shard would leave whole.
FSDPModule wrap_whole(const std::vector<torch::nn::Module*>& modules, const ReplicateOptions& options) {
  TORCH_CHECK_VALUE(!options.mesh.defined() || options.mesh.ndim() == 1, "replicate takes a 1-D mesh, got ",
                    options.mesh.ndim(),
                    " dims; slice it by name, as in mesh[\"dp\"], flatten it, or shard over the "
                    "last dim with fully_shard");
  return sharding::wrap_modules("replicate", modules,
                                {.mesh = options.mesh,
                                 .reshard_after_forward = false,
                                 .sync_init = options.sync_init,
                                 .mp_policy = options.mp_policy,
                                 .offload_policy = options.offload_policy,
                                 .ignored_params = options.ignored_params,
                                 .replicate_below = sharding::kAllWhole});
}

}  // namespace

FSDPModule replicate(torch::nn::Module& module, const ReplicateOptions& options) {
  return wrap_whole({&module}, options);
}

FSDPModule replicate(const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const ReplicateOptions& options) {
  return wrap_whole(sharding::pointers_to("replicate", modules), options);
}

}  // namespace fsdp
