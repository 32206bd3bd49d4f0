#pragma once
// One call of checkpoint(): which tensors autograd wanted to save, and how to compute them again.
//
// In forward each saved tensor becomes a number. In backward the first number that is asked for runs the function again
// and keeps what autograd wants to save then, under the same numbers: once for each backward (graph task). Each value
// is given out once and then forgotten, so that memory falls while backward proceeds.
#include <fsdp/activation_checkpoint.h>

#include <map>
#include <mutex>
#include <string>

#include "parallel/forward_state.h"
#include "parallel/saved_hooks.h"

namespace fsdp::parallel {

// What the determinism check compares.
struct TensorDescription {
  explicit TensorDescription(const at::Tensor& tensor);
  bool operator==(const TensorDescription&) const = default;
  [[nodiscard]] std::string str() const;  // "[2, 3] Float on cpu"

  std::vector<int64_t> sizes;
  at::ScalarType dtype;
  c10::Device device;
};

class CheckpointFrame : public std::enable_shared_from_this<CheckpointFrame> {
 public:
  CheckpointFrame(const CheckpointOptions& options, ForwardState state, std::function<void()> run_again);

  [[nodiscard]] size_t record(const at::Tensor& tensor);  // forward wants to save it
  void complete() { is_complete_ = true; }                // forward is over
  // What record() was given, computed again. Errors: CheckpointError, and those of the function.
  [[nodiscard]] at::Tensor value(size_t number);
  void release(size_t number);  // autograd does not need it any more

 private:
  class Rerun;
  struct Slot {
    TensorDescription description;
    bool is_needed = true;
  };
  [[nodiscard]] std::vector<at::Tensor> run();
  void forget_after(int graph_task);

  const CheckpointOptions options_;
  const ForwardState state_;
  const std::function<void()> run_again_;
  std::recursive_mutex mutex_;  // device threads of one backward may ask at the same time
  std::vector<Slot> slots_;
  bool is_complete_ = false;
  std::map<int, std::vector<at::Tensor>> values_;  // by graph task
};

}  // namespace fsdp::parallel
