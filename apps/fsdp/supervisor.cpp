#include "supervisor.h"

#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <ctime>
#include <iostream>
#include <string_view>

#include "worker_environment.h"

namespace fsdp::apps {
namespace {

constexpr std::array kForwardedSignals{SIGTERM, SIGINT, SIGHUP, SIGQUIT};
constexpr std::string_view kLocalRankMacro = "${local_rank}";
constexpr std::chrono::seconds kPatienceWithTheUnkillable{5};

int open_signal_fd() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGCHLD);
  for (const int number : kForwardedSignals) sigaddset(&signals, number);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  const int fd = signalfd(-1, &signals, SFD_NONBLOCK | SFD_CLOEXEC);
  TORCH_CHECK(fd >= 0, "signalfd: ", strerror(errno));  // NOLINT(concurrency-mt-unsafe)
  return fd;
}

std::vector<std::string> arguments_of(const LaunchSpec& spec, int local_rank) {
  auto arguments = spec.program;
  for (auto& argument : arguments) {
    for (size_t at = argument.find(kLocalRankMacro); at != std::string::npos; at = argument.find(kLocalRankMacro)) {
      argument.replace(at, kLocalRankMacro.size(), std::to_string(local_rank));
    }
  }
  return arguments;
}

std::string describe_failure(const Worker& worker) {
  const std::time_t seconds = std::chrono::system_clock::to_time_t(worker.exit()->time);
  std::array<char, 32> time{};
  std::tm local{};
  std::strftime(time.data(), time.size(), "%Y-%m-%d %H:%M:%S", localtime_r(&seconds, &local));
  return "rank " + std::to_string(worker.rank()) + " (pid " + std::to_string(worker.pid()) +
         "): " + worker.exit()->to_string() + " at " + time.data();
}

}  // namespace

Supervisor::Supervisor(LaunchSpec spec) : spec_(std::move(spec)), signal_fd_(open_signal_fd()) {}

Supervisor::~Supervisor() { close(signal_fd_); }

int Supervisor::run() {
  host_store();
  start_workers();
  while (any_running()) {
    wait_for_events();
    handle_signals();
    notice_exits();
    enforce_deadline();
    if (killed_ && Clock::now() > *kill_time_ + kPatienceWithTheUnkillable) break;
  }
  finish_output();
  if (received_signal_ != 0) return 128 + received_signal_;
  if (failures_.empty()) return 0;
  report_failures();
  return 1;
}

void Supervisor::host_store() {
  c10d::TCPStoreOptions options;
  options.port = spec_.master_port.value_or(0);
  options.isServer = true;
  options.waitWorkers = false;
  try {
    store_ = c10::make_intrusive<c10d::TCPStore>(spec_.master_addr, options);
  } catch (const c10::DistError& error) {
    TORCH_CHECK_VALUE(false, "cannot host the store on port ", options.port, " of ", spec_.master_addr,
                      ": leave --master-port out to get a free port, or choose another. ",
                      error.what_without_backtrace());
  }
}

void Supervisor::start_workers() {
  for (int rank = 0; rank < spec_.num_workers; ++rank) {
    const std::string prefix = "[" + spec_.role + std::to_string(rank) + "]:";
    workers_.push_back(std::make_unique<Worker>(rank, prefix, arguments_of(spec_, rank),
                                                worker_environment(spec_, rank, store_->getPort())));
  }
}

bool Supervisor::any_running() const {
  return std::any_of(workers_.begin(), workers_.end(), [](const auto& worker) { return worker->is_running(); });
}

void Supervisor::wait_for_events() {
  std::vector<pollfd> fds{{signal_fd_, POLLIN, 0}};
  std::vector<LineRelay*> relays;
  for (auto& worker : workers_) {
    for (auto* relay : {&worker->standard_output(), &worker->standard_error()}) {
      if (!relay->is_open()) continue;
      relays.push_back(relay);
      fds.push_back({relay->input_fd(), POLLIN, 0});
    }
  }
  // A bound on the sleep is only needed where a deadline may pass.
  const int timeout_ms = kill_time_ ? 100 : -1;
  if (poll(fds.data(), fds.size(), timeout_ms) <= 0) return;
  for (size_t i = 0; i < relays.size(); ++i) {
    if (fds[i + 1].revents != 0) relays[i]->relay_available();
  }
}

void Supervisor::handle_signals() {
  signalfd_siginfo info{};
  while (read(signal_fd_, &info, sizeof(info)) == sizeof(info)) {
    if (info.ssi_signo == SIGCHLD) continue;
    const bool again = received_signal_ != 0;
    received_signal_ = static_cast<int>(info.ssi_signo);
    std::cerr << "fsdp run: got SIG" << sigabbrev_np(received_signal_) << ": " << (again ? "killing" : "stopping")
              << " the workers" << std::endl;
    stop_workers(received_signal_);
    if (again) kill_time_ = Clock::now();
  }
}

void Supervisor::notice_exits() {
  for (auto& worker : workers_) {
    if (!worker->notice_exit() || worker->exit()->ok()) continue;
    failures_.push_back(worker.get());
  }
  if (failures_.empty() || kill_time_) return;
  num_failures_before_stop_ = failures_.size();
  stop_workers(SIGTERM);
}

void Supervisor::stop_workers(int signal_number) {
  if (kill_time_) return;
  kill_time_ = Clock::now() + spec_.grace;
  for (auto& worker : workers_) {
    if (worker->is_running()) worker->signal_group(signal_number);
  }
}

void Supervisor::enforce_deadline() {
  if (killed_ || !kill_time_ || Clock::now() < *kill_time_) return;
  killed_ = true;
  for (auto& worker : workers_) {
    if (worker->is_running()) worker->signal_group(SIGKILL);
  }
}

void Supervisor::finish_output() {
  for (auto& worker : workers_) {
    // What a worker left running must not outlive a job that failed.
    if (kill_time_) worker->signal_group(SIGKILL);
    for (auto* relay : {&worker->standard_output(), &worker->standard_error()}) {
      relay->relay_available();
      relay->finish();
    }
  }
}

void Supervisor::report_failures() const {
  std::cerr << "fsdp run: FAILED\n  first failure: " << describe_failure(*failures_[0]) << "\n";
  for (size_t i = 1; i < failures_.size(); ++i) {
    const bool before_stop = i < num_failures_before_stop_;
    std::cerr << "  " << (before_stop ? "at the same time: " : "after the stop: ") << describe_failure(*failures_[i])
              << "\n";
  }
  std::cerr << std::flush;
}

}  // namespace fsdp::apps
