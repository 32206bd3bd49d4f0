#pragma once
// Whole weights from a sharded module.
//
//   auto weights = fsdp::full_state_dict(*model);        // rank 0: every tensor, whole; other ranks: empty
//   fsdp::save_full_state_dict(*model, "model.pt");      // a plain program torch::load()s it
//
// PyTorch: get_model_state_dict(options=StateDictOptions(full_state_dict=True, cpu_offload=True)).
#include <fsdp/version.h>
#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <string>

namespace fsdp {

// Parameters and buffers by dotted name, gathered one parameter at a time to rank 0 of their mesh. Collective.
[[nodiscard]] torch::OrderedDict<std::string, at::Tensor> full_state_dict(const torch::nn::Module& module);

// Writes them on rank 0 as torch::save(module) would. Collective; a failed write raises on every rank.
void save_full_state_dict(const torch::nn::Module& module, const std::string& path);

}  // namespace fsdp
