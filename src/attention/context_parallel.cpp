#include <fsdp/context_parallel.h>
#include <fsdp/dtensor.h>
#include <fsdp/module_wrapper.h>
#include <torch/nn/modules/activation.h>

#include <exception>

#include "attention/attention_checks.h"
#include "attention/takeover.h"
#include "comm/group_state.h"
#include "comm/meeting.h"
#include "mesh/agreement.h"

namespace fsdp {

using attention::ActiveScheme;
using attention::Takeover;

namespace {

// A graph that saved the tensor must not find other tokens in it.
void put(at::Tensor& buffer, const at::Tensor& content) {
  buffer.set_data(content);
  buffer.unsafeGetTensorImpl()->bump_version();
}

bool is_among(const std::vector<at::Tensor>& tensors, const at::Tensor& tensor) {
  return std::any_of(tensors.begin(), tensors.end(), [&](const auto& other) { return other.is_same(tensor); });
}

// It computes attention from products of its own, over the tokens of this rank alone. Transformer layers hold one.
void check_modules(const torch::nn::Module& root) {
  const auto check = [](const std::string& path, const torch::nn::Module& module) {
    TORCH_CHECK_VALUE(
        !unwrapped(module).as<torch::nn::MultiheadAttention>(), "context_parallel: module '", path,
        "' is a torch::nn::MultiheadAttention, which does not call scaled_dot_product_attention: it would "
        "attend to the tokens of its own rank only. Hint: write its attention with "
        "at::scaled_dot_product_attention");
  };
  check("(root)", root);
  for (const auto& item : root.named_modules("", /*include_self=*/false)) check(item.key(), *item.value());
}

void check_plain_parameters(const torch::nn::Module& module, const DeviceMesh& mesh,
                            const ContextParallelOptions& options) {
  if (options.gradients_reduced_elsewhere || mesh.size() == 1 || !at::GradMode::is_enabled()) return;
  for (const auto& item : module.named_parameters()) {
    const auto& parameter = item.value();
    TORCH_CHECK_VALUE(!parameter.defined() || !parameter.requires_grad() || DTensor::is(parameter),
                      "context_parallel: parameter '", item.key(),
                      "' is not sharded, so it does not show that its gradient is averaged over the ", mesh.size(),
                      " ranks that share a sequence, without which they train apart. Hint: wrap ",
                      "the module with fully_shard or replicate over these ranks too, or set ",
                      "gradients_reduced_elsewhere where a DistributedDataParallel over them, or the program itself, ",
                      "averages it");
  }
}

void check_buffers(const std::vector<at::Tensor>& buffers, const std::vector<int64_t>& seq_dims,
                   const ContextParallelOptions& options) {
  TORCH_CHECK_VALUE(buffers.size() == seq_dims.size(), "context_parallel: ", buffers.size(), " buffers but ",
                    seq_dims.size(), " seq_dims");
  for (size_t i = 0; i < buffers.size(); ++i) {
    const auto& buffer = buffers[i];
    TORCH_CHECK_VALUE(buffer.defined(), "context_parallel: buffer ", i, " is undefined");
    TORCH_CHECK_VALUE(!DTensor::is(buffer), "context_parallel: buffer ", i, " is a DTensor");
    TORCH_CHECK_VALUE(!buffer.requires_grad(), "context_parallel: buffer ", i, " of shape ", buffer.sizes(),
                      " requires grad, which is lost when its content is replaced. Hint: cut it with ",
                      "context_parallel_shard");
    (void)attention::checked_seq_dim(c10::str("context_parallel: buffer ", i), buffer, seq_dims[i]);
    TORCH_CHECK_VALUE(buffer.size(seq_dims[i]) == buffers[0].size(seq_dims[0]), "context_parallel: buffer ", i,
                      " of shape ", buffer.sizes(), " has ", buffer.size(seq_dims[i]), " tokens on dim ", seq_dims[i],
                      ", and buffer 0 has ", buffers[0].size(seq_dims[0]));
    for (size_t j = 0; j < i; ++j)
      TORCH_CHECK_VALUE(!buffer.is_same(buffers[j]), "context_parallel: buffers ", j, " and ", i, " are one tensor");
  }
  for (const auto& kept : options.no_restore_buffers) {
    TORCH_CHECK_VALUE(is_among(buffers, kept),
                      "context_parallel: no_restore_buffers holds a tensor that is none of the buffers");
  }
}

// Ranks that share a sequence must have drawn the same one. Equal sums are taken for equal values.
void check_same_sequence(const std::vector<at::Tensor>& buffers, const DeviceMesh& mesh) {
  if (mesh.size() == 1 || buffers.empty()) return;
  std::string sums;
  for (const auto& buffer : buffers)
    sums += c10::str(buffer.sizes(), " ", buffer.scalar_type(), " ", checksum(buffer), "\n");
  const auto complaint = comm::meeting_of(mesh.get_group())
                             ->compare_with_rank0("start of context_parallel", sums, [&](const std::string& first) {
                               return first == sums ? "" : "this rank and the first one hold different buffers";
                             });
  TORCH_CHECK_VALUE(complaint.empty(), "context_parallel: ranks that share a sequence must hold the same inputs, but ",
                    complaint,
                    ". Hint: draw batches by the place along dp, as in DistributedSampler with the size and ",
                    "rank of mesh[\"dp\"], and seed random inputs by it");
}

std::optional<int64_t> length_of(const std::vector<at::Tensor>& buffers, const std::vector<int64_t>& seq_dims,
                                 const ContextParallelOptions& options) {
  if (buffers.empty()) return options.sequence_length;
  const auto length = buffers[0].size(seq_dims[0]);
  TORCH_CHECK_VALUE(options.sequence_length.value_or(length) == length, "context_parallel: the buffers hold ", length,
                    " tokens and the option sequence_length says ", *options.sequence_length);
  return length;
}

}  // namespace

struct ContextParallel::State {
  // One buffer, before and while it is split.
  struct Buffer {
    at::Tensor tensor;  // the caller's
    at::Tensor whole;   // another handle of what it held
    bool is_restored = true;
  };

  State(const DeviceMesh& mesh, const ContextParallelOptions& options, const std::vector<at::Tensor>& given,
        std::optional<int64_t> sequence_length)
      : scheme(std::make_shared<ActiveScheme>(mesh, options, given, sequence_length)) {}

  ~State() {
    if (takeover && !scheme->was_used() && std::uncaught_exceptions() == num_exceptions)
      TORCH_WARN(
          "context_parallel: no scaled_dot_product_attention ran inside the scope. A model with attention of its "
          "own attended to the tokens of its own rank only");
    takeover.reset();
    for (auto& buffer : buffers)
      if (buffer.is_restored) put(buffer.tensor, buffer.whole);
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  void split(const at::Tensor& buffer, int64_t seq_dim, bool is_restored) {
    const auto part = context_parallel_shard(buffer, scheme->device_mesh(), seq_dim, scheme->split());
    buffers.push_back({buffer, buffer.variable_data(), is_restored});
    put(buffers.back().tensor, part);
  }

  std::shared_ptr<ActiveScheme> scheme;
  std::vector<Buffer> buffers;
  std::optional<Takeover> takeover;  // none on a mesh of one rank
  int num_exceptions = std::uncaught_exceptions();
};

ContextParallel::ContextParallel(std::unique_ptr<State> state) : state_(std::move(state)) {}
ContextParallel::ContextParallel(ContextParallel&&) noexcept = default;
ContextParallel::~ContextParallel() = default;

int64_t ContextParallel::sequence_length() const {
  const auto length = state_->scheme->sequence_length();
  TORCH_CHECK_VALUE(length, "context_parallel: the length of the sequence is not known. Hint: give it buffers, or ",
                    "ContextParallelOptions::sequence_length");
  return *length;
}

at::Tensor ContextParallel::position_ids() const {
  const auto& mesh = state_->scheme->device_mesh();
  return local_positions(sequence_length(), mesh.get_local_rank(), mesh.size(), state_->scheme->split())
      .to(mesh.device_type());
}

at::Tensor ContextParallel::unshard(const at::Tensor& local, int64_t seq_dim) const {
  const auto& scheme = *state_->scheme;
  return context_parallel_unshard(local, scheme.device_mesh(), seq_dim, scheme.split(), scheme.sequence_length());
}

ContextParallel context_parallel(torch::nn::Module& module, const DeviceMesh& mesh,
                                 const std::vector<at::Tensor>& buffers, const std::vector<int64_t>& seq_dims,
                                 const ContextParallelOptions& options) {
  attention::check_sequence_mesh(mesh, "context_parallel");
  TORCH_CHECK_NOT_IMPLEMENTED(
      !mesh::SequenceScope::active(),
      "context_parallel inside context_parallel. Hint: end the earlier scope first; one that is "
      "assigned over it, as in scope.emplace(context_parallel(...)), begins before it ends");
  const bool splits = mesh.size() > 1;
  check_buffers(buffers, seq_dims, options);
  if (splits) check_modules(module);
  check_plain_parameters(module, mesh, options);
  check_same_sequence(buffers, mesh);
  auto state = std::make_unique<ContextParallel::State>(mesh, options, buffers, length_of(buffers, seq_dims, options));
  for (size_t i = 0; i < buffers.size(); ++i) {
    state->split(buffers[i], seq_dims[i], /*is_restored=*/!is_among(options.no_restore_buffers, buffers[i]));
  }
  if (splits) state->takeover.emplace(state->scheme);
  return ContextParallel(std::move(state));
}

}  // namespace fsdp
