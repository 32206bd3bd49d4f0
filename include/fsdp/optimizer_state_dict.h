#pragma once
// Optimizer state by parameter name: as shards that stay live, or whole on rank 0, and back again.
//
//   auto state = fsdp::optimizer_state_dict(*model, optimizer);
//   state.state["layers.0.weight"]["exp_avg"].toTensor();    // a DTensor laid out as the parameter
//   state.param_groups[0].options["lr"].toDouble();
//   fsdp::load_optimizer_state_dict(*model, other, state);   // another order of parameters is fine
//
// For torch::optim::SGD, Adam, AdamW, RMSprop, Adagrad and classes derived from them. LBFGS keeps one history over all
// parameters instead of a state a parameter, so its state has no names: c10::NotImplementedError.
// PyTorch: get_optimizer_state_dict, set_optimizer_state_dict. See docs/state_dict.md.
#include <ATen/core/ivalue.h>
#include <fsdp/state_dict.h>
#include <torch/optim/optimizer.h>

namespace fsdp {

struct OptimizerStateDict {
  // By the names that LibTorch saves: "step" (int), "exp_avg" (tensor), "lr" (double), "nesterov" (bool), "betas" (a
  // pair of doubles).
  using Values = torch::OrderedDict<std::string, c10::IValue>;
  struct ParamGroup {
    std::vector<std::string> params;
    Values options;
  };
  // One entry a parameter of the optimizer; without values when it has no state yet. A tied parameter has its first
  // name only.
  torch::OrderedDict<std::string, Values> state;
  std::vector<ParamGroup> param_groups;
};

// Tensors share memory with the optimizer. Never communicates. Errors here and below: c10::ValueError when the
// optimizer holds a tensor that is no parameter of `module`, c10::NotImplementedError for another kind of optimizer.
[[nodiscard]] OptimizerStateDict optimizer_state_dict(const torch::nn::Module& module,
                                                      const torch::optim::Optimizer& optimizer);

// Whole tensors on the CPU of rank 0, gathered one at a time; no state and no groups on other ranks. Collective.
[[nodiscard]] OptimizerStateDict full_optimizer_state_dict(const torch::nn::Module& module,
                                                           const torch::optim::Optimizer& optimizer);

// State, step counters and options of the groups. Whole tensors are cut as their parameters are; tensors that the
// optimizer has already are written in place. Groups are found by the names in them. With strict = false, parameters
// that the dict does not know keep their state, and names that the optimizer does not know are skipped. Collective.
// Errors: c10::ValueError on every rank, before anything is changed, for missing and unexpected names, groups that
// are cut differently, wrong shapes, and values that this kind of optimizer does not have.
void load_optimizer_state_dict(const torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                               const OptimizerStateDict& dict, const LoadStateDictOptions& options = {});

// Cuts whole state tensors as their parameters are, in place: after an optimizer stepped before fully_shard, was made
// before it (Adagrad), or torch::load(optimizer, file) of a plain file. Never communicates. Errors: c10::ValueError
// for a tensor shaped unlike its parameter; nothing is changed then.
void shard_optimizer_state(const torch::nn::Module& module, torch::optim::Optimizer& optimizer);

}  // namespace fsdp
