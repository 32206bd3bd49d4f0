#pragma once
// Runs the workers of one node until all have ended.
#include <memory>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "launch_spec.h"
#include "worker.h"

namespace fsdp::apps {

// When one worker fails, or a signal reaches the launcher, all workers are asked to stop (SIGTERM, or that same
// signal), and killed after the grace period, whole process groups. A second signal kills at once.
class Supervisor {
 public:
  // Blocks the signals it handles; construct it before any other thread runs.
  explicit Supervisor(LaunchSpec spec);
  ~Supervisor();
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  // The exit code of the launcher: 0, 1 after a failure, 128 + n after signal n. Errors: c10::ValueError when the port
  // is in use.
  [[nodiscard]] int run();

 private:
  using Clock = std::chrono::steady_clock;

  void host_store();
  void start_workers();
  void wait_for_events();
  void handle_signals();
  void notice_exits();
  void stop_workers(int signal_number);
  void enforce_deadline();
  void finish_output();
  void report_failures() const;
  [[nodiscard]] bool any_running() const;

  LaunchSpec spec_;
  int signal_fd_ = -1;
  c10::intrusive_ptr<c10d::TCPStore> store_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<const Worker*> failures_;  // in the order of their ends, those before the stop first
  size_t num_failures_before_stop_ = 0;
  int received_signal_ = 0;
  std::optional<Clock::time_point> kill_time_;  // set once workers were asked to stop
  bool killed_ = false;
};

}  // namespace fsdp::apps
