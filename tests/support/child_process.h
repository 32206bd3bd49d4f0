#pragma once
// A program started by a test: its output, its exit, and certainty that it does not outlive the test.
#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace fsdp::testing {

// Variables to set, or to unset (nullopt), on top of what this process has.
using EnvironmentChanges = std::map<std::string, std::optional<std::string>>;

struct ExitStatus {
  int code = -1;   // -1 when a signal ended it
  int signal = 0;  // 0 when it exited
};

// Leads a process group of its own; the destructor kills that group. Dies with this process too. Start it from a thread
// that lives as long as it should.
class ChildProcess {
 public:
  explicit ChildProcess(std::vector<std::string> argv, EnvironmentChanges environment = {});
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  [[nodiscard]] pid_t pid() const { return pid_; }
  void signal(int number) const;  // the process itself
  void kill_group() const;        // it and its children, by SIGKILL

  // Standard output and error so far, as they came.
  [[nodiscard]] std::string output() const;
  // False when the program ended or `limit` passed before `text` was printed.
  [[nodiscard]] bool wait_for_output(const std::string& text, std::chrono::seconds limit);
  // nullopt when it still runs after `limit`.
  [[nodiscard]] std::optional<ExitStatus> wait(std::chrono::seconds limit);

 private:
  void watch(int output_fd);

  pid_t pid_ = -1;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::string output_;
  std::optional<ExitStatus> status_;
  std::thread watcher_;
};

// Whether a process with this id exists (a zombie does not count).
[[nodiscard]] bool is_alive(pid_t pid);

}  // namespace fsdp::testing
