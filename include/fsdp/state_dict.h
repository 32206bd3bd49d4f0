#pragma once
// Weights of a module by name: as shards that stay live, or whole on rank 0, and back again.
//
//   auto weights = fsdp::state_dict(*model);                 // every rank: DTensors that share memory with the model
//   auto whole = fsdp::full_state_dict(*model);              // rank 0: plain tensors; other ranks: empty
//   fsdp::load_state_dict(*model, weights);                  // in place; shards or whole tensors, on every rank
//   fsdp::load_state_dict(*model, whole, {.broadcast_from_rank0 = true});   // rank 0 alone has them
//
// Names are those of PyTorch: wrapping changes none, parameters and buffers of a module come before those of its
// children, and a tied parameter appears under each of its names. "Rank 0" is the first rank of the module's mesh. A
// module that is not sharded, also one in a DistributedDataParallel, has none: every rank counts as rank 0 then.
// PyTorch: get_model_state_dict, set_model_state_dict, StateDictOptions. See docs/state_dict.md.
#include <fsdp/version.h>
#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <functional>
#include <string>
#include <vector>

namespace fsdp {

using StateDict = torch::OrderedDict<std::string, at::Tensor>;

// Parameters and buffers, detached: writes to either side are seen on the other. Never communicates. Errors, here and
// below: c10::Error for a buffer that a context_parallel splits.
[[nodiscard]] StateDict state_dict(const torch::nn::Module& module);

struct LoadStateDictOptions {
  bool strict = true;                 // missing and unexpected names are errors; otherwise they are returned
  bool broadcast_from_rank0 = false;  // rank 0 passes whole tensors; what other ranks pass is ignored
};

// Names in the module without a value, and values without a place in the module. PyTorch: _IncompatibleKeys.
struct IncompatibleKeys {
  std::vector<std::string> missing_keys;
  std::vector<std::string> unexpected_keys;
};

// Copies values into the module in place; dtypes are converted. A value may be a whole tensor or a DTensor of any
// layout. From rank 0 alone, one tensor at a time is scattered: the extra memory is about one tensor there and one
// shard elsewhere. Collective. Errors: c10::ValueError on every rank, before anything is changed, that lists missing
// and unexpected names and wrong shapes; c10::Error when parameters are on the meta device.
IncompatibleKeys load_state_dict(torch::nn::Module& module, const StateDict& weights,
                                 const LoadStateDictOptions& options = {});

// Gets every whole tensor on rank 0, one at a time, under each of its names (tied names one after the other); the
// tensor is the callee's to keep, and is freed when it does not. Called on rank 0 only.
using TensorSink = std::function<void(const std::string& name, const at::Tensor& whole)>;

// Collective. What `sink` throws is rethrown on rank 0, and ends the stream with a c10::Error on the other ranks.
void stream_full_state_dict(const torch::nn::Module& module, const TensorSink& sink);

// All of them at once, on the CPU. Empty on ranks other than 0. Collective.
[[nodiscard]] StateDict full_state_dict(const torch::nn::Module& module);

// Writes them on rank 0 as torch::save(module) of the plain module would. Collective; a failed write raises a
// c10::Error on every rank.
void save_full_state_dict(const torch::nn::Module& module, const std::string& path);

}  // namespace fsdp
