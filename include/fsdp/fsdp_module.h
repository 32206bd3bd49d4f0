#pragma once
// The handle by which a wrapped module's sharding is steered: when it gathers, frees and reduces.
//
//   auto layer = fsdp::FSDPModule::of(*model->layers[0]);
//   layer.set_modules_to_forward_prefetch({fsdp::FSDPModule::of(*model->layers[1])});
//   layer.set_requires_gradient_sync(false);   // accumulate without communication
//
// Every setting holds from the next use on. PyTorch: torch.distributed.fsdp.FSDPModule, the same names.
#include <ATen/core/Tensor.h>
#include <fsdp/version.h>

#include <functional>
#include <memory>
#include <vector>

namespace torch::nn {
class Module;
}

namespace fsdp {

namespace sharding {
class ModuleState;
}

// What unshard(true) returns.
class UnshardHandle {
 public:
  explicit UnshardHandle(std::shared_ptr<sharding::ModuleState> state) : state_(std::move(state)) {}
  void wait();  // until the parameters are there; again: nothing. The first use waits by itself

 private:
  std::shared_ptr<sharding::ModuleState> state_;
};

class FSDPModule {
 public:
  explicit FSDPModule(std::shared_ptr<sharding::ModuleState> state) : state_(std::move(state)) {}
  // Errors: c10::ValueError when `module` was not wrapped.
  [[nodiscard]] static FSDPModule of(const torch::nn::Module& module);

  // Gathers this module's own parameters now; they stay until they were used, or until reshard(). With `async_op` the
  // gather is only started.
  UnshardHandle unshard(bool async_op = false);  // NOLINT(modernize-use-nodiscard): the handle may be dropped
  void reshard();                                // frees them

  // --- when parameters are gathered and freed ---
  // After own gather, starts the gathers of these, in order; replaces what was learnt. {}: no prefetch.
  void set_modules_to_forward_prefetch(const std::vector<FSDPModule>& modules);
  void set_modules_to_backward_prefetch(const std::vector<FSDPModule>& modules);
  void set_reshard_after_forward(bool reshard_after_forward, bool recurse = true);
  void set_reshard_after_backward(bool reshard_after_backward, bool recurse = true);
  // false: never prefetched in backward. An op that reads it there still gathers it.
  void set_unshard_in_backward(bool unshard_in_backward);
  // false: what is gathered at the end of a backward stays for the next one. Of the whole root.
  void set_is_last_backward(bool is_last_backward);
  // After an exception in forward or backward: waits for what flies, frees gathered parameters, drops unsynced
  // gradients. Errors: c10::Error when this is not the root.
  void reset_iter_state();

  // --- what becomes of gradients ---
  // false: backward keeps whole gradients on this rank (in reduce_dtype); `.grad` stays as it is until a backward with
  // true reduces them all.
  void set_requires_gradient_sync(bool requires_gradient_sync, bool recurse = true);
  // false, on a (replicate, shard) mesh: reduces over the shards only, and over the replicas with the next true.
  void set_requires_all_reduce(bool requires_all_reduce, bool recurse = true);
  // The sum over all ranks is divided by `factor` instead of by their number. This module's own parameters only.
  // Errors: c10::ValueError unless positive and finite.
  void set_gradient_divide_factor(double factor);
  // true: parameters without a gradient on some ranks count as zeros there, and get a gradient on all ranks.
  void set_reduce_scatter_unused_params(bool reduce_unused, bool recurse = true);
  // How many reductions may be in flight, at least 1; the largest of all modules counts.
  void set_reduce_scatter_max_input_buffers(int64_t num_buffers, bool recurse = true);
  // Called with the flat reduced gradients (a sum over ranks, in reduce_dtype) before they are divided; may change
  // them in place. Where it is called is where the gradients are first waited for. {} removes it.
  void set_all_reduce_hook(std::function<void(const at::Tensor&)> hook);
  // Reductions here always sum and divide afterwards, on every backend: accepted, changes nothing.
  void set_force_sum_reduction_for_comms(bool force_sum);

  // --- settings of device streams, refused: c10::NotImplementedError ---
  [[noreturn]] void set_post_optim_event();
  [[noreturn]] void set_separate_reduce_scatter_group(bool enable = true, bool recurse = true);
  [[noreturn]] void set_symm_mem_for_comm();
  [[noreturn]] void set_allocate_memory_from_process_group_for_comm(bool enable);
  [[noreturn]] void set_custom_all_gather();
  [[noreturn]] void set_custom_reduce_scatter();

  [[nodiscard]] const std::shared_ptr<sharding::ModuleState>& state() const { return state_; }

 private:
  std::shared_ptr<sharding::ModuleState> state_;
};

// PyTorch: torch.distributed.fsdp.share_comm_ctx. Refused: c10::NotImplementedError; a CPU mesh has no streams to
// share.
[[noreturn]] void share_comm_ctx(const std::vector<FSDPModule>& modules);

}  // namespace fsdp
