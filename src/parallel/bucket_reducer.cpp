#include "parallel/bucket_reducer.h"

#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <limits>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "comm/collectives.h"
#include "parallel/bucket_hook.h"

namespace fsdp::parallel {

// Tells in words what c10d::Reducer knows of a backward that did not end.
class WatchedReducer : public c10d::Reducer {
 public:
  using c10d::Reducer::Reducer;

  [[nodiscard]] bool is_unfinished() const {
    const std::lock_guard lock(mutex_);
    return require_finalize_;
  }
  // The reducer notes the time at which each gradient was ready.
  void forget_ready_times() {
    const std::lock_guard lock(mutex_);
    std::fill(backward_stats_.begin(), backward_stats_.end(), kNever);
  }
  [[nodiscard]] std::vector<size_t> not_ready() const {
    const std::lock_guard lock(mutex_);
    std::vector<size_t> indices;
    for (size_t i = 0; i < backward_stats_.size(); ++i)
      if (backward_stats_[i] == kNever) indices.push_back(i);
    return indices;
  }

 private:
  static constexpr int64_t kNever = -1;
};

namespace {

// What the reducer cuts out of its buckets meanwhile are no views to autograd: optimizers detach gradients in place
// before they zero them, which is an error for views.
using NoViews = at::AutoDispatchBelowADInplaceOrView;

// The first bucket is small where unused parameters are looked for: they make no other buckets later. All others start
// with one bucket, and learn from the first backward.
std::vector<size_t> first_size_limits(const BucketOptions& options) {
  if (options.static_graph || !options.find_unused_parameters) return {std::numeric_limits<size_t>::max()};
  const auto first = static_cast<size_t>(options.first_bucket_bytes);
  const auto rest = static_cast<size_t>(options.bucket_bytes);
  return first < rest ? std::vector<size_t>{first, rest} : std::vector<size_t>{rest};
}

std::shared_ptr<WatchedReducer> make_reducer(const std::vector<ReducedTensor>& parameters, const ProcessGroup& group,
                                             const BucketOptions& options) {
  std::vector<at::Tensor> tensors;
  std::vector<bool> are_sparse;
  std::unordered_map<size_t, std::string> names;
  for (const auto& parameter : parameters) {
    names.emplace(tensors.size(), parameter.path);
    tensors.push_back(parameter.tensor);
    are_sparse.push_back(parameter.has_sparse_gradient);
  }
  auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(tensors, first_size_limits(options), are_sparse));
  std::reverse(buckets.begin(), buckets.end());  // gradients are ready from the last parameter to the first
  const NoViews no_views;
  auto reducer = std::make_shared<WatchedReducer>(
      std::move(tensors), std::move(buckets), group, std::move(are_sparse), options.bucket_bytes,
      options.find_unused_parameters, options.gradient_as_bucket_view, std::move(names), options.first_bucket_bytes,
      /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false, std::vector<int64_t>());
  if (options.static_graph) reducer->set_static_graph();
  return reducer;
}

}  // namespace

class BucketReducer::Core {
 public:
  Core(std::vector<ReducedTensor> reduced, ProcessGroup process_group, const BucketOptions& bucket_options)
      : parameters(std::move(reduced)),
        group(std::move(process_group)),
        options(bucket_options),
        reducer(make_reducer(parameters, group, options)),
        logger(std::make_shared<c10d::Logger>(reducer)) {
    reducer->set_logger(logger);
    BucketHook::Paths paths;
    for (const auto& parameter : parameters) {
      paths.emplace(parameter.tensor.unsafeGetTensorImpl(), parameter.path);
      kinds.push_back(parameter.tensor.options());
    }
    auto bucket_hook = std::make_unique<BucketHook>(group, std::move(paths));
    hook = bucket_hook.get();
    reducer->register_comm_hook(std::move(bucket_hook));
  }

  // In the first backward of a static graph the reducer only counts; everything is reduced at its end.
  void queue_static_reduction(const std::shared_ptr<Core>& self) {
    if (!options.static_graph || has_queued_static_reduction) return;
    has_queued_static_reduction = true;
    torch::autograd::Engine::get_default_engine().queue_callback([self] { self->reducer->delay_all_reduce(); });
  }

  std::vector<ReducedTensor> parameters;
  std::vector<at::TensorOptions> kinds;  // of the parameters, when the buckets were made
  ProcessGroup group;
  BucketOptions options;
  std::shared_ptr<WatchedReducer> reducer;
  // The reducer calls it without asking whether it is there when other parameters are unused than before.
  std::shared_ptr<c10d::Logger> logger;
  BucketHook* hook = nullptr;  // lives in the reducer
  bool has_queued_static_reduction = false;
};

// Stands behind the outputs of a forward. An output that the loss does not use then brings an undefined gradient to its
// parameters, rather than nothing, so that the reducer hears of them.
class BucketReducer::Sink : public torch::autograd::Node {
 public:
  Sink(torch::autograd::edge_list edges, std::shared_ptr<Core> core)
      : torch::autograd::Node(std::move(edges)), core_(std::move(core)) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    core_->queue_static_reduction(core_);
    return grads;
  }
  [[nodiscard]] std::string name() const override { return "DistributedDataParallelBackward"; }

  // `outputs` that have a graph become outputs of a new sink, with the same values and version counters.
  static void connect(std::vector<at::Tensor>& outputs, const std::shared_ptr<Core>& core) {
    torch::autograd::edge_list edges;
    for (const auto& output : outputs)
      if (output.defined() && output.grad_fn()) edges.push_back(torch::autograd::impl::gradient_edge(output));
    if (edges.empty()) return;
    const auto sink = c10::make_intrusive<Sink>(std::move(edges), core);
    for (auto& output : outputs) {
      if (!output.defined() || !output.grad_fn()) continue;
      auto* impl = output.unsafeGetTensorImpl();
      at::Tensor alias(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
      torch::autograd::impl::set_gradient_edge(alias, {sink, sink->add_input_metadata(alias)});
      output = std::move(alias);
    }
  }

 private:
  std::shared_ptr<Core> core_;
};

BucketReducer::BucketReducer(std::vector<ReducedTensor> parameters, const ProcessGroup& group,
                             const BucketOptions& options)
    : core_(std::make_shared<Core>(std::move(parameters), group, options)) {}

BucketReducer::~BucketReducer() = default;

void BucketReducer::check_finished() const {
  if (!core_->reducer->is_unfinished()) return;
  std::vector<std::string> missing;
  for (const auto index : core_->reducer->not_ready())
    missing.push_back(c10::str(core_->parameters[index].path, " (index ", index, ")"));
  TORCH_CHECK(
      false,
      "DistributedDataParallel: the last backward reached some parameters and not these: ", c10::Join(", ", missing),
      ". So their gradients were not averaged, and the other ranks may wait for them. ",
      core_->options.find_unused_parameters
          ? "Although unused parameters are looked for, these seemed to be used: let every output of forward be "
            "a tensor, or a tuple, vector or map of them"
          : "If forward does not use them in every step, pass find_unused_parameters = true",
      ". If the backward ended in an exception, make the DistributedDataParallel anew");
}

// A parameter of another dtype or device accumulates its gradient elsewhere, where nothing averages it.
void BucketReducer::check_same_kinds() const {
  for (size_t i = 0; i < core_->parameters.size(); ++i) {
    const auto& [path, now, is_sparse] = core_->parameters[i];
    const auto& before = core_->kinds[i];
    TORCH_CHECK(now.scalar_type() == c10::typeMetaToScalarType(before.dtype()) && now.device() == before.device(),
                "DistributedDataParallel: parameter '", path, "' was ", before.dtype(), " on ", before.device(),
                " when the module was wrapped and is ", now.scalar_type(), " on ", now.device(),
                " now, so its gradient would not be averaged; convert the module before it is wrapped");
  }
}

void BucketReducer::set_divisor(int64_t divisor) { core_->hook->set_divisor(divisor); }

void BucketReducer::start_forward() {
  core_->reducer->prepare_for_forward();
  comm::run_collectives(core_->group, "broadcast", "the new order of buckets", [this] {
    const NoViews no_views;
    core_->reducer->rebuild_buckets();
  });
}

bool BucketReducer::learns_graph() const { return core_->options.static_graph && !core_->has_queued_static_reduction; }

bool BucketReducer::needs_outputs() const { return learns_graph() || core_->options.find_unused_parameters; }

void BucketReducer::expect_backward(std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> searched;
  if (core_->options.find_unused_parameters)
    std::copy_if(outputs.begin(), outputs.end(), std::back_inserter(searched),
                 [](const at::Tensor& output) { return output.defined(); });
  core_->reducer->forget_ready_times();
  core_->reducer->prepare_for_backward(searched);
  if (needs_outputs()) Sink::connect(outputs, core_);
}

void BucketReducer::shadow_backward() {
  auto& reducer = *core_->reducer;
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> started;
  for (auto& bucket : reducer.get_grad_buckets(/*return_zero_tensors=*/true))
    started.push_back(reducer.run_comm_hook(bucket));
  for (const auto& future : started) (void)core_->hook->parseHookResult(future->value());
  if (core_->options.find_unused_parameters) {
    // Its own copy of the map holds what the last backward of all ranks used.
    std::vector<at::Tensor> uses{at::zeros_like(reducer.get_local_used_map_on_device())};
    comm::run_collectives(core_->group, "all_reduce", "the parameters in use",
                          [&] { core_->group->allreduce(uses)->wait(); });
  }
  reducer.push_rebuilt_params_for_all_indices();
}

bool is_reduced_already(const at::Tensor& tensor) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(tensor);
  if (!accumulator) return false;
  const auto& hooks = accumulator->post_hooks();
  return std::any_of(hooks.begin(), hooks.end(), [](const auto& hook) {
    return dynamic_cast<const torch::autograd::utils::LambdaPostHook*>(hook.get()) != nullptr;
  });
}

}  // namespace fsdp::parallel
