#include "comm/collectives.h"

#include <numeric>

#include "comm/duration.h"
#include "comm/error_kinds.h"
#include "comm/group_state.h"
#include "comm/log.h"
#include "comm/meeting.h"
#include "comm/whereabouts.h"

namespace fsdp::comm {
namespace {

std::string describe_collective(const ProcessGroup& group, const char* kind, const std::string& what) {
  return c10::str("rank ", group->getRank(), " of ", group->getSize(), ": ", kind, " of ", what);
}

[[noreturn]] void fail_collective(const ProcessGroup& group, const char* kind, const std::string& what,
                                  const std::exception& error) {
  const auto others = whereabouts(group, c10::str(kind, " of ", what));
  C10_THROW_ERROR(DistError, c10::str(describe_collective(group, kind, what), " failed: ", reason_of(error),
                                      ". A peer left or did not come within ", to_seconds(group_timeout(group)), " (",
                                      others, "): look at the log of the first rank that failed"));
}

void check_tensor(const at::Tensor& tensor, const ProcessGroup& group, const char* kind, const std::string& what) {
  TORCH_CHECK_VALUE(group.defined(), kind, " of ", what, ": the group is null, this rank is not part of it");
  TORCH_CHECK_VALUE(tensor.defined(), kind, " of ", what, ": the tensor is undefined");
  TORCH_CHECK_VALUE(tensor.is_contiguous(), kind, " of ", what, ": the tensor has strides ", tensor.strides(),
                    ", but contiguous memory is needed: call contiguous()");
  TORCH_CHECK_VALUE(group->hasBackendForDeviceType(tensor.device().type()), kind, " of ", what,
                    ": the group has no backend for tensors on ", tensor.device().type());
}

// `whole` holds one part a rank.
void check_parts(const at::Tensor& whole, const at::Tensor& part, const ProcessGroup& group, const char* kind,
                 const std::string& what) {
  check_tensor(whole, group, kind, what);
  check_tensor(part, group, kind, what);
  TORCH_CHECK_VALUE(whole.scalar_type() == part.scalar_type(), kind, " of ", what, ": dtypes ", whole.scalar_type(),
                    " and ", part.scalar_type(), " differ");
  TORCH_CHECK_VALUE(whole.numel() == part.numel() * group->getSize(), kind, " of ", what, ": ", whole.numel(),
                    " elements are not ", group->getSize(), " ranks times ", part.numel(), " elements");
}

void check_counts(const at::Tensor& tensor, const std::vector<int64_t>& counts, const ProcessGroup& group,
                  const std::string& what) {
  check_tensor(tensor, group, "all_to_all", what);
  TORCH_CHECK_VALUE(static_cast<int>(counts.size()) == group->getSize(), "all_to_all of ", what, ": ", counts.size(),
                    " counts for ", group->getSize(), " ranks");
  const auto sum = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  const bool any_negative = std::any_of(counts.begin(), counts.end(), [](int64_t count) { return count < 0; });
  TORCH_CHECK_VALUE(sum == tensor.numel() && !any_negative, "all_to_all of ", what, ": counts ",
                    at::IntArrayRef(counts), " for ", tensor.numel(), " elements");
}

// FSDP_DEBUG=detail: all ranks agree first on what they are about to do.
void compare_first(const std::string& amount, const ProcessGroup& group, const char* kind, const std::string& what) {
  if (!checks_every_collective() || group->getSize() == 1) return;
  meeting_of(group)->meet_to(c10::str("start ", kind, " of ", what, " (", amount, ")"));
}

// `amount` is what must be equal on all ranks.
template <class Start>
PendingCollective start_collective(const std::string& amount, const ProcessGroup& group, const char* kind,
                                   const std::string& what, Start start) {
  compare_first(amount, group, kind, what);
  try {
    return {start(), group, kind, what};
  } catch (const std::exception& error) {
    C10_THROW_ERROR(DistError, c10::str(describe_collective(group, kind, what), " cannot start: ", reason_of(error)));
  }
}

template <class Start>
PendingCollective start_collective(const at::Tensor& data, const ProcessGroup& group, const char* kind,
                                   const std::string& what, Start start) {
  const auto amount = checks_every_collective() ? c10::str(data.numel(), " x ", data.scalar_type()) : std::string();
  return start_collective(amount, group, kind, what, std::move(start));
}

// gloo wants both sides of a gather in matching shapes; memory is what counts here.
at::Tensor flat_view(const at::Tensor& tensor) { return tensor.dim() == 1 ? tensor : tensor.view({-1}); }

// For collectives that compute nothing: backends know few dtypes.
at::Tensor as_bytes(const at::Tensor& tensor) { return flat_view(tensor).view(at::kByte); }

}  // namespace

PendingCollective::PendingCollective(c10::intrusive_ptr<c10d::Work> work, const ProcessGroup& group, const char* kind,
                                     std::string what)
    : work_(std::move(work)), group_(group), kind_(kind), what_(std::move(what)) {}

void PendingCollective::wait() {
  if (!work_.defined()) return;
  try {
    work_->wait();
  } catch (const std::exception& error) {  // the work stays: whoever waits again must not take the data for good
    fail_collective(group_, kind_, what_, error);
  }
  work_.reset();
}

PendingCollective all_gather(const at::Tensor& output, const at::Tensor& input, const ProcessGroup& group,
                             const std::string& what) {
  check_parts(output, input, group, "all_gather", what);
  if (input.numel() == 0) return {};
  at::Tensor whole = as_bytes(output);
  at::Tensor part = as_bytes(input);
  return start_collective(input, group, "all_gather", what, [&] { return group->all_gather_single(whole, part); });
}

PendingCollective reduce_scatter(const at::Tensor& output, const at::Tensor& input, const ProcessGroup& group,
                                 const std::string& what, c10d::ReduceOp::RedOpType op) {
  check_parts(input, output, group, "reduce_scatter", what);
  if (output.numel() == 0) return {};
  at::Tensor whole = flat_view(input);
  at::Tensor part = flat_view(output);
  c10d::ReduceScatterOptions options;
  options.reduceOp = op;
  return start_collective(part, group, "reduce_scatter", what,
                          [&] { return group->reduce_scatter_single(part, whole, options); });
}

PendingCollective all_to_all(const at::Tensor& output, const std::vector<int64_t>& output_counts,
                             const at::Tensor& input, const std::vector<int64_t>& input_counts,
                             const ProcessGroup& group, const std::string& what) {
  check_counts(output, output_counts, group, what);
  check_counts(input, input_counts, group, what);
  TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type(), "all_to_all of ", what, ": dtypes ",
                    output.scalar_type(), " and ", input.scalar_type(), " differ");
  const auto in_bytes = [&](std::vector<int64_t> counts) {
    for (auto& count : counts) count *= input.element_size();
    return counts;
  };
  at::Tensor received = as_bytes(output);
  at::Tensor sent = as_bytes(input);
  auto received_counts = in_bytes(output_counts);
  auto sent_counts = in_bytes(input_counts);
  const auto amount = c10::str(input.scalar_type());  // how much differs between ranks
  return start_collective(amount, group, "all_to_all", what,
                          [&] { return group->all_to_all_single(received, sent, received_counts, sent_counts); });
}

std::vector<PendingCollective> all_reduce(const std::vector<at::Tensor>& tensors, const ProcessGroup& group,
                                          const std::string& what, c10d::ReduceOp::RedOpType op) {
  for (const auto& tensor : tensors) check_tensor(tensor, group, "all_reduce", what);
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  std::vector<PendingCollective> pending;
  pending.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    std::vector<at::Tensor> one{tensor};
    pending.push_back(
        start_collective(tensor, group, "all_reduce", what, [&] { return group->allreduce(one, options); }));
  }
  return pending;
}

PendingCollective broadcast(const at::Tensor& tensor, int root, const ProcessGroup& group, const std::string& what) {
  check_tensor(tensor, group, "broadcast", what);
  TORCH_CHECK_VALUE(root >= 0 && root < group->getSize(), "broadcast of ", what, ": root is ", root,
                    ", but the group has ranks 0 to ", group->getSize() - 1);
  c10d::BroadcastOptions options;
  options.rootRank = root;
  std::vector<at::Tensor> tensors{as_bytes(tensor)};
  return start_collective(tensor, group, "broadcast", what, [&] { return group->broadcast(tensors, options); });
}

PendingCollective scatter_from_rank0(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                                     const ProcessGroup& group, const std::string& what) {
  check_tensor(output, group, "scatter", what);
  if (output.numel() == 0) return {};
  std::vector<std::vector<at::Tensor>> parts;
  if (group->getRank() == 0) {
    TORCH_CHECK_VALUE(static_cast<int>(inputs.size()) == group->getSize(), "scatter of ", what, ": ", inputs.size(),
                      " parts for ", group->getSize(), " ranks");
    parts.emplace_back();
    for (const auto& input : inputs) {
      check_tensor(input, group, "scatter", what);
      TORCH_CHECK_VALUE(input.scalar_type() == output.scalar_type() && input.numel() == output.numel(), "scatter of ",
                        what, ": a part of ", input.numel(), " ", input.scalar_type(), ", but a rank takes ",
                        output.numel(), " ", output.scalar_type());
      parts.front().push_back(as_bytes(input));
    }
  }
  std::vector<at::Tensor> outputs{as_bytes(output)};
  return start_collective(output, group, "scatter", what, [&] { return group->scatter(outputs, parts); });
}

PendingCollective gather_to_rank0(const at::Tensor& output, const at::Tensor& input, const ProcessGroup& group,
                                  const std::string& what) {
  check_tensor(input, group, "gather", what);
  if (input.numel() == 0) return {};
  std::vector<std::vector<at::Tensor>> outputs;
  if (group->getRank() == 0) {
    check_parts(output, input, group, "gather", what);
    outputs.push_back(as_bytes(output).view({group->getSize(), -1}).unbind(0));
  }
  std::vector<at::Tensor> inputs{as_bytes(input)};
  return start_collective(input, group, "gather", what, [&] { return group->gather(outputs, inputs); });
}

void run_collectives(const ProcessGroup& group, const char* kind, const std::string& what,
                     const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    const bool is_misuse = dynamic_cast<const c10::Error*>(&error) && !dynamic_cast<const c10::DistError*>(&error);
    if (is_misuse) throw;
    fail_collective(group, kind, what, error);
  }
}

}  // namespace fsdp::comm
