#include "parallel/ddp_state.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "comm/collectives.h"
#include "comm/log.h"
#include "mesh/reduce_numbers.h"
#include "mesh/sequence_scope.h"
#include "parallel/ddp_parameters.h"
#include "sharding/module_tree.h"

namespace fsdp::parallel {
namespace {

constexpr double kBytesPerMb = 1024.0 * 1024.0;
constexpr double kDefaultBucketMb = 25;
constexpr double kDefaultFirstBucketMb = 1;
constexpr double kMaxBucketBytes = 0x1p62;  // more than any model, and an int64_t
constexpr size_t kBroadcastBytes = size_t{250} * 1024 * 1024;

DeviceMesh checked_ddp_mesh(const DeviceMesh& mesh) {
  if (!mesh.defined()) {
    if (!is_initialized()) init_process_group();
    return init_device_mesh(c10::kCPU, {static_cast<int64_t>(world_size())});
  }
  TORCH_CHECK_VALUE(mesh.ndim() == 1, "DistributedDataParallel takes a 1-D mesh, got ", mesh.ndim(),
                    " dims; slice it by name, as in mesh[\"dp\"], or flatten it");
  TORCH_CHECK_VALUE(mesh.get_coordinate(), "this rank is not in the mesh given to DistributedDataParallel");
  return mesh;
}

DistributedDataParallelOptions checked_ddp_options(const DistributedDataParallelOptions& options) {
  auto checked = options;
  checked.mesh = checked_ddp_mesh(options.mesh);
  const auto cap = options.bucket_cap_mb;
  TORCH_CHECK_VALUE(!cap || (std::isfinite(*cap) && *cap > 0), "DistributedDataParallel: bucket_cap_mb is ",
                    cap.value_or(0), ", but a positive and finite number of MiB is needed");
  if (options.static_graph && options.find_unused_parameters) {
    TORCH_WARN_ONCE(
        "DistributedDataParallel: find_unused_parameters has no effect beside static_graph, which learns in the first "
        "step what is unused");
  }
  return checked;
}

BucketOptions bucket_options_of(const DistributedDataParallelOptions& options) {
  const auto bytes = [](double mb) { return static_cast<int64_t>(std::clamp(mb * kBytesPerMb, 1.0, kMaxBucketBytes)); };
  const auto cap = options.bucket_cap_mb;
  return {.bucket_bytes = bytes(cap.value_or(kDefaultBucketMb)),
          .first_bucket_bytes = bytes(cap.value_or(kDefaultFirstBucketMb)),
          .find_unused_parameters = options.find_unused_parameters && !options.static_graph,
          .gradient_as_bucket_view = options.gradient_as_bucket_view,
          .static_graph = options.static_graph};
}

// Each tensor once, under a version counter of its own: a broadcast into a buffer that an earlier forward saved is no
// change of that forward. Without what context_parallel splits: there each rank holds its own part.
template <class Items>
std::vector<at::Tensor> values_of(const Items& items) {
  std::vector<at::Tensor> values;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& item : items) {
    if (!item.value().defined() || mesh::SequenceScope::splits(item.value())) continue;
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) values.push_back(item.value().variable_data());
  }
  return values;
}

bool has_split_buffers(const torch::nn::Module& module) {
  const auto buffers = module.buffers();
  return std::any_of(buffers.begin(), buffers.end(), mesh::SequenceScope::splits);
}

}  // namespace

DdpState::DdpState(torch::nn::Module& module, const DistributedDataParallelOptions& options)
    : module_(module), options_(checked_ddp_options(options)), group_(options_.mesh.get_group()) {
  auto parameters = ddp_parameters(module, options_.mesh.device_type());
  check_same_on_all_ranks(parameters, module, options_);
  if (options_.init_sync) broadcast_model(0);
  int64_t num_bytes = 0;
  for (const auto& parameter : parameters.trained) num_bytes += static_cast<int64_t>(parameter.tensor.nbytes());
  comm::log_line(comm::LogLevel::kInfo,
                 c10::str("DistributedDataParallel(", sharding::type_name(module), "): ", parameters.trained.size(),
                          " parameters, ", num_bytes, " bytes of gradients over ", group_->getSize(), " ranks"));
  frozen_ = std::move(parameters.frozen);
  for (const auto& parameter : parameters.trained)
    if (parameter.has_sparse_gradient) sparse_path_ = parameter.path;
  reducer_ = std::make_unique<BucketReducer>(std::move(parameters.trained), group_, bucket_options_of(options_));
}

void DdpState::before_forward() {
  const bool records = at::GradMode::is_enabled();
  if (records) {
    reducer_->check_finished();
    reducer_->check_same_kinds();
    check_frozen();
  }
  syncs_ = records && (requires_sync_ || reducer_->learns_graph());
  int authority = 0;
  if (join_) {
    (void)join_->next(/*has_data=*/true);  // it is not the end: this rank has data
    authority = agree_on_step(/*has_data=*/true, syncs_).authority;
    reducer_->set_divisor(static_cast<int64_t>(std::llround(group_->getSize() / join_->weight())));
  }
  if (syncs_) reducer_->start_forward();
  if (buffers_due_) broadcast_buffers(authority);
}

void DdpState::after_forward(std::vector<at::Tensor>& outputs) {
  buffers_due_ = syncs_;
  if (syncs_) reducer_->expect_backward(outputs);
}

void DdpState::check_frozen() const {
  for (const auto& parameter : frozen_)
    TORCH_CHECK(!parameter.tensor.requires_grad(), "DistributedDataParallel: parameter '", parameter.path,
                "' did not require grad when the module was wrapped, so its gradient would not be averaged; make the "
                "DistributedDataParallel anew after requires_grad changes");
}

DdpState::Step DdpState::agree_on_step(bool has_data, bool syncs) const {
  const auto rank = static_cast<double>(group_->getRank());
  const double any_syncs = syncs ? 1 : 0;
  const double all_sync = has_data ? -any_syncs : -1;  // negated: the largest is the smallest
  const double splits = options_.broadcast_buffers && has_split_buffers(module_) ? 1 : 0;
  const auto largest = reduce_numbers({has_data ? rank : -1, any_syncs, all_sync, splits}, options_.mesh,
                                      "agree on a step (DistributedDataParallel::join)", c10d::ReduceOp::MAX);
  TORCH_CHECK(
      largest[1] == -largest[2],
      "DistributedDataParallel::join: in one step some ranks average gradients and others do not: use no_sync() "
      "and torch::NoGradGuard in the same steps on all ranks");
  TORCH_CHECK_NOT_IMPLEMENTED(
      largest[3] == 0,
      "DistributedDataParallel::join: forward inside a context_parallel that splits buffers of "
      "the module, while ranks without data do not know which. Hint: broadcast_buffers = false");
  return {.syncs = largest[1] == 1, .authority = static_cast<int>(largest[0])};
}

// The collectives of before_forward() and of backward, in their order.
void DdpState::shadow_step() {
  const auto step = agree_on_step(/*has_data=*/false, /*syncs=*/false);
  if (step.syncs) reducer_->start_forward();
  if (buffers_due_) broadcast_buffers(step.authority);
  buffers_due_ = step.syncs;
  if (step.syncs) reducer_->shadow_backward();
}

void DdpState::join(const std::function<void()>& loop, const JoinOptions& options) {
  TORCH_CHECK(!join_, "DistributedDataParallel::join inside join");
  TORCH_CHECK_NOT_IMPLEMENTED(!options_.static_graph,
                              "DistributedDataParallel::join with static_graph: a rank without data does not know the "
                              "graph of the others");
  TORCH_CHECK_NOT_IMPLEMENTED(sparse_path_.empty(), "DistributedDataParallel::join: parameter '", sparse_path_,
                              "' has a sparse gradient, and a rank without data does not know its form. Hint: make the "
                              "Embedding without sparse(true)");
  struct Leave {
    DdpState& state;
    ~Leave() {
      state.join_.reset();
      state.reducer_->set_divisor(state.group_->getSize());
    }
  };
  const Leave leave{*this};
  join_.emplace(options_.mesh, options);
  loop();
  bool was_last = true;
  while (join_->next(/*has_data=*/false)) {
    was_last = false;
    shadow_step();
  }
  const auto rank = static_cast<double>(group_->getRank());
  const auto last = reduce_numbers({was_last ? rank : -1}, options_.mesh,
                                   "agree on a last rank (DistributedDataParallel::join)", c10d::ReduceOp::MAX);
  broadcast_model(static_cast<int>(last[0]));
}

void DdpState::broadcast_buffers(int root) {
  if (options_.broadcast_buffers) broadcast(values_of(module_.named_buffers()), root, "buffers");
}

void DdpState::broadcast_model(int root) {
  broadcast(values_of(module_.named_parameters()), root, "parameters");
  broadcast(values_of(module_.named_buffers()), root, "buffers");
}

void DdpState::broadcast(const std::vector<at::Tensor>& tensors, int root, const std::string& what) const {
  if (tensors.empty() || group_->getSize() == 1) return;
  const at::NoGradGuard no_grad;
  comm::run_collectives(group_, "broadcast", what,
                        [&] { c10d::broadcast_coalesced(group_, tensors, kBroadcastBytes, root); });
}

}  // namespace fsdp::parallel
