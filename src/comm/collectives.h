#pragma once
// The collectives this library uses. Each checks its arguments on this rank before the backend sees them (gloo aborts
// the process on some mismatches) and turns a failure into an error that says who, what and what to do.
#include <fsdp/process_group.h>

#include <functional>

namespace fsdp::comm {

// A collective in flight. The destructor does not wait.
class PendingCollective {
 public:
  PendingCollective() = default;
  // `kind` is a literal such as "all_gather"; `what` names the data: "layers.3".
  PendingCollective(c10::intrusive_ptr<c10d::Work> work, const ProcessGroup& group, const char* kind, std::string what);

  [[nodiscard]] bool defined() const { return work_.defined(); }

  // May be called again: at once after success, with the same error after a failure.
  // Errors: c10::DistError naming this rank, the collective and the data.
  void wait();

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  ProcessGroup group_;
  const char* kind_ = "";
  std::string what_;
};

// All errors below: c10::ValueError for sizes, dtypes, layouts or devices that do not fit; c10::DistError when the
// backend cannot start.

// output [size * n] <- the inputs [n] of all ranks, in rank order.
[[nodiscard]] PendingCollective all_gather(const at::Tensor& output, const at::Tensor& input, const ProcessGroup& group,
                                           const std::string& what);

// output [n] <- this rank's part of the reduction of all inputs [size * n].
[[nodiscard]] PendingCollective reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                               const ProcessGroup& group, const std::string& what,
                                               c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM);

// Both flat, cut by rank: `input` into what goes to each rank, `output` into what comes from each. The counts are
// elements and may be zero; what one rank sends another must expect.
[[nodiscard]] PendingCollective all_to_all(const at::Tensor& output, const std::vector<int64_t>& output_counts,
                                           const at::Tensor& input, const std::vector<int64_t>& input_counts,
                                           const ProcessGroup& group, const std::string& what);

// In place; one collective a tensor.
[[nodiscard]] std::vector<PendingCollective> all_reduce(const std::vector<at::Tensor>& tensors,
                                                        const ProcessGroup& group, const std::string& what,
                                                        c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM);

// In place, from group rank `root`.
[[nodiscard]] PendingCollective broadcast(const at::Tensor& tensor, int root, const ProcessGroup& group,
                                          const std::string& what);

// output [n] <- on every rank its own entry of group rank 0's `inputs`, one [n] a rank; elsewhere `inputs` is ignored.
[[nodiscard]] PendingCollective scatter_from_rank0(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                                                   const ProcessGroup& group, const std::string& what);

// On group rank 0: output [size * n] <- the inputs [n] of all ranks; elsewhere `output` is ignored.
[[nodiscard]] PendingCollective gather_to_rank0(const at::Tensor& output, const at::Tensor& input,
                                                const ProcessGroup& group, const std::string& what);

// Runs collectives that LibTorch starts by itself, and waits for them. `body` may raise errors of misuse: they pass;
// all others become a c10::DistError as above.
void run_collectives(const ProcessGroup& group, const char* kind, const std::string& what,
                     const std::function<void()>& body);

}  // namespace fsdp::comm
