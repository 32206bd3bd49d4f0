#pragma once
// Models larger than one rank's memory: build without memory, shard, then give each rank its part and values.
//
//   Transformer model{nullptr};
//   {
//     const fsdp::MetaDeviceGuard meta;                        // no memory, no random numbers
//     model = Transformer(args);
//   }
//   for (auto& layer : *model->layers) fsdp::fully_shard(*layer, {.mesh = mesh});
//   fsdp::fully_shard(model, {.mesh = mesh});
//   torch::manual_seed(1);
//   fsdp::materialize(model, torch::kCPU, fsdp::reset_parameters);   // the values one process would get
//   torch::optim::AdamW optimizer(model->parameters(), 3e-4);        // after it
//
// PyTorch: torch.device("meta"), Module.to_empty. See docs/meta_init.md.
#include <c10/core/Device.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fsdp/module_pointer.h>
#include <torch/nn/module.h>

#include <functional>

namespace fsdp {

// While it lives, tensors that this thread makes without naming a device are on the meta device: sizes and dtypes, no
// memory. One thread, one scope: C++ modules take no device, so it has to come from around them.
class MetaDeviceGuard {
 public:
  MetaDeviceGuard();
  MetaDeviceGuard(const MetaDeviceGuard&) = delete;
  MetaDeviceGuard& operator=(const MetaDeviceGuard&) = delete;

 private:
  c10::impl::IncludeDispatchKeyGuard guard_;
};

// Gives everything in `module` that is on the meta device memory on `device`, then runs `init(module)` for the values.
// Tensors stay the same objects, so ties stay ties. `init` may use torch::nn::init, fill in place, or
// load_state_dict(); the same seed gives the same values at every world size. Collective over the module's meshes.
// Errors, on every rank: c10::ValueError listing the parameters and buffers that `init` left without values, in whole
// or in part (a buffer that rank 0 has values for is broadcast instead); c10::ValueError for a device that is not the
// mesh's, or a module that shares a group with parameters outside it. What `init` throws is rethrown on its rank and a
// c10::Error elsewhere. After an error, floating-point tensors without values hold NaN, others zeros.
void materialize(torch::nn::Module& module, c10::Device device, const std::function<void(torch::nn::Module&)>& init);
template <detail::ModulePointer P>
void materialize(const P& module, c10::Device device, const std::function<void(torch::nn::Module&)>& init) {
  materialize(detail::module_of(module, "materialize"), device, init);
}

// Calls reset_parameters() of every module of torch::nn below `module` that has it, children before their parents'
// later children, as they were built. Modules of your own need an init of their own for parameters they registered.
void reset_parameters(torch::nn::Module& module);

}  // namespace fsdp
