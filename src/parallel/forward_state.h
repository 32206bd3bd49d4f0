#pragma once
// What a function that runs again must find as its first run found it: dispatch keys, what scopes such as
// context_parallel left in thread-local state, autograd modes, autocast, and the generators of random numbers.
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <vector>

namespace fsdp::parallel {

struct GeneratorState {
  at::Generator generator;
  at::Tensor state;
};

class ForwardState {
 public:
  // As it is now. The generators are those of the CPU and of `devices`.
  ForwardState(bool with_random_state, const std::vector<c10::Device>& devices);

  // While it lives, this thread is as it was; afterwards as it was before, generators included.
  class Replay {
   public:
    explicit Replay(const ForwardState& state);
    ~Replay();
    Replay(const Replay&) = delete;
    Replay& operator=(const Replay&) = delete;

   private:
    std::vector<GeneratorState> generators_;
    c10::impl::ForceDispatchKeyGuard keys_;
    std::shared_ptr<c10::ThreadLocalDebugInfo> scopes_;
    c10::AutogradState autograd_;
    std::vector<at::ScalarType> autocast_dtypes_;
  };

 private:
  std::vector<GeneratorState> generators_;
  c10::impl::LocalDispatchKeySet keys_;
  std::shared_ptr<c10::ThreadLocalDebugInfo> scopes_;
  c10::AutogradState autograd_;
  std::vector<at::ScalarType> autocast_dtypes_;  // one for each device type that knows autocast
};

}  // namespace fsdp::parallel
