#include "support/child_process.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <fstream>
#include <string_view>
#include <system_error>

extern char** environ;  // NOLINT(readability-redundant-declaration)

namespace fsdp::testing {
namespace {

std::vector<std::string> changed_environment(const EnvironmentChanges& changes) {
  std::vector<std::string> lines;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view line(*entry);
    if (!changes.contains(std::string(line.substr(0, line.find('='))))) lines.emplace_back(line);
  }
  for (const auto& [name, value] : changes) {
    if (value) lines.push_back(name + "=" + *value);
  }
  return lines;
}

std::vector<char*> pointers_to(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (auto& text : strings) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

// Between fork and exec only async-signal-safe calls are allowed.
[[noreturn]] void become_program(pid_t parent, int output_fd, char** argv, char** envp) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);
  setpgid(0, 0);
  dup2(output_fd, STDOUT_FILENO);
  dup2(output_fd, STDERR_FILENO);
  execve(argv[0], argv, envp);
  _exit(127);
}

ExitStatus reap(pid_t pid) {
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFSIGNALED(status)) return {-1, WTERMSIG(status)};
  return {WEXITSTATUS(status), 0};
}

}  // namespace

ChildProcess::ChildProcess(std::vector<std::string> argv, EnvironmentChanges environment) {
  auto lines = changed_environment(environment);
  auto argv_pointers = pointers_to(argv);
  auto envp_pointers = pointers_to(lines);
  std::array<int, 2> ends{};
  TORCH_CHECK(pipe2(ends.data(), O_CLOEXEC) == 0, "pipe2: ", std::system_category().message(errno));
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ == 0) become_program(parent, ends[1], argv_pointers.data(), envp_pointers.data());
  close(ends[1]);
  TORCH_CHECK(pid_ > 0, "fork: ", std::system_category().message(errno));
  setpgid(pid_, pid_);  // also here: whichever of the two comes first
  watcher_ = std::thread([this, fd = ends[0]] { watch(fd); });
}

ChildProcess::~ChildProcess() {
  kill_group();
  watcher_.join();
}

void ChildProcess::watch(int output_fd) {
  std::array<char, 4096> buffer{};
  while (true) {
    const ssize_t count = read(output_fd, buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    const std::lock_guard lock(mutex_);
    output_.append(buffer.data(), count);
    changed_.notify_all();
  }
  close(output_fd);
  siginfo_t info{};
  waitid(P_PID, pid_, &info, WEXITED | WNOWAIT);  // keeps the id ours until the lock is held
  const std::lock_guard lock(mutex_);
  status_ = reap(pid_);
  changed_.notify_all();
}

void ChildProcess::signal(int number) const {
  const std::lock_guard lock(mutex_);
  if (!status_) ::kill(pid_, number);
}

void ChildProcess::kill_group() const {
  const std::lock_guard lock(mutex_);
  if (!status_) ::kill(-pid_, SIGKILL);
}

std::string ChildProcess::output() const {
  const std::lock_guard lock(mutex_);
  return output_;
}

bool ChildProcess::wait_for_output(const std::string& text, std::chrono::seconds limit) {
  std::unique_lock lock(mutex_);
  const auto printed = [&] { return output_.find(text) != std::string::npos; };
  changed_.wait_for(lock, limit, [&] { return printed() || status_.has_value(); });
  return printed();
}

std::optional<ExitStatus> ChildProcess::wait(std::chrono::seconds limit) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, limit, [&] { return status_.has_value(); });
  return status_;
}

bool is_alive(pid_t pid) {
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string text((std::istreambuf_iterator<char>(stat)), {});
  const auto name_end = text.rfind(')');  // the state letter follows the name
  return name_end != std::string::npos && text.substr(name_end + 2, 1) != "Z";
}

}  // namespace fsdp::testing
