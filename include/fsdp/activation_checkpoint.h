#pragma once
// Activation checkpointing: less memory for more compute. Of what `fn` computes, only its arguments are kept; backward
// runs `fn` again to have the rest.
//
//   for (size_t i = 0; i < blocks->size(); ++i) h = fsdp::checkpoint(blocks->ptr<BlockImpl>(i), h);
//   auto [a, b] = fsdp::checkpoint([self = shared](const at::Tensor& x, int n) { return self->split(x, n); }, h, 2);
//
// `fn` runs again after the caller has returned: capture by value, never by reference.
// PyTorch: torch.utils.checkpoint.checkpoint(use_reentrant=False).
#include <fsdp/checkpoint_arguments.h>
#include <fsdp/version.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace fsdp {

struct CheckpointOptions {
  bool preserve_rng_state = true;  // draw the same random numbers again: dropout masks
  bool determinism_check = true;   // compare shape, dtype and device of what is computed again with the first time
  bool early_stop = true;          // leave `fn` as soon as the last tensor that backward needs is there
};

// `fn` computed something else the second time, or a saved tensor was asked for twice in one backward.
class CheckpointError : public c10::Error {
 public:
  using c10::Error::Error;
};

namespace parallel {

// Whether a graph is recorded now; otherwise a checkpoint is a plain call.
[[nodiscard]] bool records_graph();

// While it lives, what autograd saves on this thread belongs to one checkpoint, and is not kept.
class CheckpointScope {
 public:
  // `devices`: of the arguments; their random states are kept beside the CPU's.
  CheckpointScope(const CheckpointOptions& options, const std::vector<c10::Device>& devices,
                  std::function<void()> run_again);
  ~CheckpointScope();
  CheckpointScope(const CheckpointScope&) = delete;
  CheckpointScope& operator=(const CheckpointScope&) = delete;

 private:
  class Recording;
  std::unique_ptr<Recording> recording_;
};

template <class T>
struct IsModulePointer : std::false_type {};
template <class M>
struct IsModulePointer<std::shared_ptr<M>> : std::is_base_of<torch::nn::Module, M> {};

// Something that can be called: `fn` itself, or the forward of a module pointer, which keeps the module alive.
template <class Fn>
auto as_function(const Fn& fn) {
  if constexpr (IsModulePointer<Fn>::value) {
    return [fn](auto&&... args) { return fn->forward(std::forward<decltype(args)>(args)...); };
  } else {
    return fn;
  }
}

}  // namespace parallel

// Returns fn(args...): one tensor, a tuple, anything. `fn` is a function object, a TORCH_MODULE holder or a
// std::shared_ptr to a module. Tensors in `args`, also inside vector, array, optional, pair and tuple, are kept as
// autograd keeps them; all else is copied. Without a graph to record (torch::NoGradGuard) it is a plain call.
// Errors: those of `fn`; in backward CheckpointError when `fn` does not compute the same again, and c10::Error when an
// argument was changed in place.
template <class Fn, class... Args>
auto checkpoint(const CheckpointOptions& options, const Fn& fn, Args&&... args) {
  auto call = parallel::as_function(fn);
  if (!parallel::records_graph()) return std::invoke(call, std::forward<Args>(args)...);
  using Kept = std::tuple<parallel::Kept<std::decay_t<Args>>...>;
  const auto kept = std::make_shared<Kept>(parallel::Kept<std::decay_t<Args>>(args)...);
  std::vector<c10::Device> devices;
  std::apply([&](const auto&... argument) { (argument.add_devices(devices), ...); }, *kept);
  const parallel::CheckpointScope scope(options, devices, [call, kept]() mutable {
    std::apply([&](const auto&... argument) { (void)std::invoke(call, argument.get()...); }, *kept);
  });
  return std::invoke(call, std::forward<Args>(args)...);
}

template <class Fn, class... Args>
requires(!std::is_same_v<Fn, CheckpointOptions>) auto checkpoint(const Fn& fn, Args&&... args) {
  return checkpoint(CheckpointOptions{}, fn, std::forward<Args>(args)...);
}

}  // namespace fsdp
