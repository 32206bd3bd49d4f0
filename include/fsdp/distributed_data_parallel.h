#pragma once
// The same module on every rank, each with its own part of the batch; backward averages the gradients over the ranks.
//
//   auto ddp = fsdp::DistributedDataParallel(net, {.mesh = mesh});   // net: a TORCH_MODULE holder or a shared_ptr
//   torch::optim::AdamW optimizer(ddp->parameters(), 1e-4);
//   auto loss = ddp->forward(x).square().mean();                     // forward through ddp, not through net
//   loss.backward();                                                 // all-reduces while it computes
//   optimizer.step();
//
// On LibTorch's own c10d::Reducer: gradients travel in buckets, each as soon as it is complete, and after the first
// step the buckets follow the order in which gradients become ready. For parameters that should not be whole on every
// rank see fully_shard.h; for a replica without a forward of its own, replicate.h.
// PyTorch: torch.nn.parallel.DistributedDataParallel.
#include <fsdp/device_mesh.h>
#include <fsdp/join.h>
#include <fsdp/module_wrapper.h>
#include <fsdp/tensor_tree.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>
#include <optional>
#include <typeinfo>
#include <utility>
#include <vector>

namespace fsdp {

struct DistributedDataParallelOptions {
  DeviceMesh mesh = {};                                // 1-D; unset: all ranks
  std::optional<double> bucket_cap_mb = std::nullopt;  // MiB a bucket; unset: 25, the first one 1
  bool find_unused_parameters = false;   // parameters that the outputs of a forward do not depend on may exist
  bool gradient_as_bucket_view = false;  // gradients are views of the buckets: no second copy of them
  bool broadcast_buffers = true;         // rank 0's buffers on all ranks before each forward
  bool init_sync = true;                 // start from rank 0's parameters and buffers
  // Every step uses the same parameters, equally often: unused and reused ones are learnt in the first backward.
  bool static_graph = false;
};

namespace parallel {
class DdpState;
}

// While it lives, backward leaves gradients on this rank, where they add up; the next one outside averages the sum. The
// first backward of a static_graph averages here too; averaged again they stay what they are, so the sum is the same.
class NoSync {
 public:
  explicit NoSync(std::shared_ptr<parallel::DdpState> state);
  ~NoSync();
  NoSync(NoSync&&) noexcept = default;
  NoSync& operator=(NoSync&&) = delete;

 private:
  std::shared_ptr<parallel::DdpState> state_;
  bool before_;
};

// All but the type of the wrapped module. Parameters, buffers and state dicts have the wrapped module's names.
class DistributedDataParallelBase : public WrapperModule {
 public:
  // For every forward whose backward should only accumulate. PyTorch: no_sync().
  [[nodiscard]] NoSync no_sync() { return NoSync(state_); }

  // Runs `loop`, an epoch over this rank's batches, and then takes part in the steps of ranks that have more of them,
  // with gradients of zero. At the end every rank has the model of a rank that was last. Every rank calls it. What
  // `loop` throws passes at once. PyTorch: join(), whose divide_by_initial_world_size is true unless said otherwise.
  // Each forward in `loop` that records a graph is a step, and has one backward of its own before the next one: two
  // forwards for one backward, or one without, end in a c10::DistError; evaluate under torch::NoGradGuard. The
  // optimizer of a rank that ended early missed steps: give it the state of a rank that did not (docs/ddp.md), or make
  // a new one. Errors: those of Join; c10::NotImplementedError with static_graph, with a parameter whose gradient is
  // sparse, or where a context_parallel in `loop` splits buffers of the module and broadcast_buffers is on; c10::Error
  // inside another join(), or when in one step only some ranks are in a NoSync.
  void join(const std::function<void()>& loop, const JoinOptions& options = {});

  // Only what changes nothing. Errors: c10::ValueError, as the buckets hold gradients of the old kind: convert the
  // module before it is wrapped.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

 protected:
  DistributedDataParallelBase(std::shared_ptr<torch::nn::Module> module, const DistributedDataParallelOptions& options);

  void before_forward();
  // `outputs`: the tensors in what forward returned, some of which may be exchanged for what stands for them.
  void after_forward(std::vector<at::Tensor>& outputs);
  // Where no tensors can be found in the output. Errors: c10::ValueError when they are needed.
  void after_forward_without_tensors(const std::type_info& type);

 private:
  void check_same_kind(std::optional<torch::Device> device, std::optional<torch::Dtype> dtype) const;

  std::shared_ptr<parallel::DdpState> state_;
};

template <class M>
class DistributedDataParallelImpl : public DistributedDataParallelBase {
 public:
  DistributedDataParallelImpl(std::shared_ptr<M> module, const DistributedDataParallelOptions& options)
      : DistributedDataParallelBase(module, options), wrapped_(std::move(module)) {}

  // wrapped()->forward(args...). Errors: c10::Error when the last backward did not reach a parameter, naming it;
  // c10::DistError when a rank is gone.
  template <class... Args>
  auto forward(Args&&... args) {
    using Output = std::decay_t<decltype(wrapped_->forward(std::forward<Args>(args)...))>;
    before_forward();
    if constexpr (std::is_void_v<Output>) {
      wrapped_->forward(std::forward<Args>(args)...);
      after_forward_without_tensors(typeid(Output));
    } else {
      Output output = wrapped_->forward(std::forward<Args>(args)...);
      if constexpr (kMayHoldTensors<Output>) {
        std::vector<at::Tensor> tensors;
        for_each_tensor(output, [&tensors](at::Tensor& tensor) { tensors.push_back(tensor); });
        after_forward(tensors);
        auto next = tensors.begin();
        for_each_tensor(output, [&next](at::Tensor& tensor) { tensor = *next++; });
      } else {
        after_forward_without_tensors(typeid(Output));
      }
      return output;
    }
  }

  // The module itself. Its own forward computes without communication: evaluation on one rank only.
  [[nodiscard]] const std::shared_ptr<M>& wrapped() const { return wrapped_; }

 private:
  std::shared_ptr<M> wrapped_;
};

// A module holder of DistributedDataParallelImpl<M>; the wrapped type is deduced. All ranks of the mesh make it
// together. Errors: c10::ValueError on every rank, naming the parameter, when ranks hold different modules;
// c10::ValueError for a null module, a mesh that is not 1-D, a module without a parameter that requires grad, in a
// DistributedDataParallel already, or with a sharded parameter or one on the meta device; c10::DistError when ranks do
// not come.
template <class M>
class DistributedDataParallel : public torch::nn::ModuleHolder<DistributedDataParallelImpl<M>> {
  using Holder = torch::nn::ModuleHolder<DistributedDataParallelImpl<M>>;

 public:
  DistributedDataParallel(std::nullptr_t) : Holder(nullptr) {}  // NOLINT(google-explicit-constructor): as all holders
  explicit DistributedDataParallel(std::shared_ptr<M> module, const DistributedDataParallelOptions& options = {})
      : Holder(std::make_shared<DistributedDataParallelImpl<M>>(std::move(module), options)) {}
  explicit DistributedDataParallel(const torch::nn::ModuleHolder<M>& holder,
                                   const DistributedDataParallelOptions& options = {})
      : DistributedDataParallel(holder.ptr(), options) {}

  // forward(args...), as with every holder; the base class cannot call a forward that is a template.
  template <class... Args>
  auto operator()(Args&&... args) {
    return this->get()->forward(std::forward<Args>(args)...);
  }
};

}  // namespace fsdp
