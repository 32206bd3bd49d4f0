#pragma once
// One process that the launcher started.
#include <sys/types.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "line_relay.h"

namespace fsdp::apps {

struct WorkerExit {
  int code = 0;    // when it exited
  int signal = 0;  // else what killed it
  std::chrono::system_clock::time_point time;

  [[nodiscard]] bool ok() const { return code == 0 && signal == 0; }
  [[nodiscard]] std::string to_string() const;  // "exit code 7", "signal 9 (SIGKILL)"
};

// Leads a session of its own, so that a signal reaches all that it starts. Gets SIGKILL when the launcher dies.
class Worker {
 public:
  // Errors: c10::Error when the system cannot start another process.
  Worker(int rank, const std::string& prefix, std::vector<std::string> argv, std::vector<std::string> environment);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] pid_t pid() const { return pid_; }
  [[nodiscard]] bool is_running() const { return !exit_.has_value(); }
  [[nodiscard]] const std::optional<WorkerExit>& exit() const { return exit_; }
  [[nodiscard]] LineRelay& standard_output() { return *output_; }
  [[nodiscard]] LineRelay& standard_error() { return *error_; }

  // True when it ended since the last call. Its process id stays reserved until the destructor.
  bool notice_exit();
  void signal_group(int number) const;

 private:
  int rank_;
  pid_t pid_ = -1;
  std::optional<WorkerExit> exit_;
  std::unique_ptr<LineRelay> output_;
  std::unique_ptr<LineRelay> error_;
};

}  // namespace fsdp::apps
