#include "worker.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace fsdp::apps {
namespace {

using Pipe = std::array<int, 2>;

Pipe make_pipe() {
  Pipe ends{};
  TORCH_CHECK(pipe2(ends.data(), O_CLOEXEC) == 0, "cannot make a pipe: ", std::system_category().message(errno));
  return ends;
}

std::vector<char*> c_strings(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (auto& text : strings) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

// Between fork and exec only async-signal-safe calls are allowed: the store's threads may hold any lock.
[[noreturn]] void exec_worker(pid_t launcher, int rank, int output_fd, int error_fd, char** argv, char** environment) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != launcher) _exit(127);
  setsid();
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  signal(SIGPIPE, SIG_DFL);
  if (rank != 0) {  // one reader of the launcher's input is enough
    const int nothing = open("/dev/null", O_RDONLY);
    dup2(nothing, STDIN_FILENO);
  }
  dup2(output_fd, STDOUT_FILENO);
  dup2(error_fd, STDERR_FILENO);
  execve(argv[0], argv, environment);
  const char* reason = strerrordesc_np(errno);
  std::ignore = write(STDERR_FILENO, "cannot run the program: ", 24);
  std::ignore = write(STDERR_FILENO, reason, strlen(reason));
  _exit(127);
}

}  // namespace

std::string WorkerExit::to_string() const {
  if (signal == 0) return "exit code " + std::to_string(code);
  const char* name = sigabbrev_np(signal);
  return "signal " + std::to_string(signal) + (name != nullptr ? std::string(" (SIG") + name + ")" : "");
}

Worker::Worker(int rank, const std::string& prefix, std::vector<std::string> argv, std::vector<std::string> environment)
    : rank_(rank) {
  auto argv_pointers = c_strings(argv);
  auto environment_pointers = c_strings(environment);
  const Pipe output = make_pipe();
  const Pipe error = make_pipe();
  output_ = std::make_unique<LineRelay>(output[0], STDOUT_FILENO, prefix);
  error_ = std::make_unique<LineRelay>(error[0], STDERR_FILENO, prefix);
  const pid_t launcher = getpid();
  pid_ = fork();
  if (pid_ == 0) exec_worker(launcher, rank, output[1], error[1], argv_pointers.data(), environment_pointers.data());
  const int reason = errno;
  close(output[1]);
  close(error[1]);
  TORCH_CHECK(pid_ > 0, "cannot start a worker: ", std::system_category().message(reason));
}

Worker::~Worker() {
  if (pid_ <= 0) return;
  const bool killed = is_running();
  if (killed) signal_group(SIGKILL);
  waitpid(pid_, nullptr, killed ? WNOHANG : 0);
}

bool Worker::notice_exit() {
  if (exit_) return false;
  siginfo_t info{};
  if (waitid(P_PID, pid_, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) return false;
  const bool exited = info.si_code == CLD_EXITED;
  exit_ = WorkerExit{exited ? info.si_status : 0, exited ? 0 : info.si_status, std::chrono::system_clock::now()};
  return true;
}

void Worker::signal_group(int number) const {
  // Right after the fork the worker may not lead its session yet.
  if (kill(-pid_, number) != 0 && is_running()) kill(pid_, number);
}

}  // namespace fsdp::apps
