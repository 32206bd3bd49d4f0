#pragma once
// Runs what may fail on one rank alone, such as code of the user, and keeps what it throws until all ranks know.
//
//   Outcome outcome;
//   outcome.run([&] { sink(name, whole); });
//   const auto complaint = any_complaint(meshes, "the sink", outcome.complaint());
//   outcome.rethrow();                          // on this rank what it threw
//   TORCH_CHECK(complaint.empty(), complaint);  // on the others
#include <exception>
#include <functional>
#include <string>

namespace fsdp::train {

class Outcome {
 public:
  // Nothing more runs after a failure.
  void run(const std::function<void()>& body);
  // What was thrown, without LibTorch's backtrace; "" when all went well.
  [[nodiscard]] const std::string& complaint() const { return complaint_; }
  void rethrow() const;  // what was thrown, if anything was

 private:
  std::exception_ptr thrown_;
  std::string complaint_;
};

}  // namespace fsdp::train
