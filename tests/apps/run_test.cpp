// fsdp run: what workers get, what users see, and that nothing is left behind.
#include <arpa/inet.h>
#include <fsdp/process_group.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <regex>
#include <thread>

#include "comm/collectives.h"
#include "support/spawn_ranks.h"

namespace fsdp {
namespace {

using testing::ChildProcess;
using testing::EnvironmentChanges;
using ::testing::HasSubstr;
using testing::is_alive;
using ::testing::Not;
using namespace std::chrono_literals;

constexpr auto kLimit = 60s;
using Arguments = std::vector<std::string>;

ChildProcess start_launcher(const Arguments& arguments, EnvironmentChanges environment = {}) {
  Arguments argv{FSDP_PROGRAM, "run"};
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  for (const auto* name : {"OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "PET_NPROC_PER_NODE"}) {
    environment.try_emplace(name, std::nullopt);
  }
  return ChildProcess(argv, std::move(environment));
}

struct LauncherRun {
  int code = -1;
  std::string output;
};

LauncherRun run_launcher(const Arguments& arguments, const EnvironmentChanges& environment = {}) {
  auto launcher = start_launcher(arguments, environment);
  const auto status = launcher.wait(kLimit);
  EXPECT_TRUE(status.has_value()) << "the launcher hangs: " << launcher.output();
  return {status ? status->code : -1, launcher.output()};
}

// The test program itself as the worker, running a body.
LauncherRun run_body(const std::string& body, Arguments options, EnvironmentChanges environment = {}) {
  environment["FSDP_TEST_BODY"] = body;
  options.push_back(std::filesystem::read_symlink("/proc/self/exe"));
  return run_launcher(options, environment);
}

int count(const std::string& text, const std::string& pattern) {
  const std::regex regex(pattern);
  return static_cast<int>(std::distance(std::sregex_iterator(text.begin(), text.end(), regex), {}));
}

// Ids that workers printed as "pid N".
std::vector<pid_t> printed_pids(const std::string& output) {
  std::vector<pid_t> pids;
  const std::regex regex("pid ([0-9]+)");
  for (std::sregex_iterator match(output.begin(), output.end(), regex), end; match != end; ++match) {
    pids.push_back(std::stoi((*match)[1]));
  }
  return pids;
}

// An asynchronous death: waits for it, and fails when it does not come.
void expect_gone(const std::vector<pid_t>& pids) {
  const auto deadline = std::chrono::steady_clock::now() + kLimit;
  for (const auto pid : pids) {
    while (is_alive(pid) && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    EXPECT_FALSE(is_alive(pid)) << "worker " << pid << " is left behind";
  }
}

RANKS_BODY(run_all_reduce) {
  init_process_group({.timeout = 30s});
  const auto value = torch::full({1}, rank() + 1);
  for (auto& pending : comm::all_reduce({value}, default_group(), "x")) pending.wait();
  std::printf("sum %d of %d\n", value.item<int>(), world_size());
}

TEST(Run, WorkersFormAGroup) {
  const auto run = run_body("run_all_reduce", {"--nproc-per-node", "2"});
  EXPECT_EQ(run.code, 0) << run.output;
  EXPECT_THAT(run.output, HasSubstr("[default0]:sum 3 of 2\n"));
  EXPECT_THAT(run.output, HasSubstr("[default1]:sum 3 of 2\n"));
}

TEST(Run, AWorkerMayRunOneProgramAfterAnother) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  const auto run = run_launcher({"--nproc-per-node", "2", "/bin/sh", "-c", "$SELF && $SELF"},
                                {{"SELF", self}, {"FSDP_TEST_BODY", "run_all_reduce"}});
  EXPECT_EQ(run.code, 0) << run.output;
  EXPECT_EQ(count(run.output, "sum 3 of 2"), 4) << run.output;
}

TEST(Run, TwoJobsAtOnceDoNotFightOverAPort) {
  const EnvironmentChanges environment{{"FSDP_TEST_BODY", "run_all_reduce"}};
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  auto first = start_launcher({"--nproc-per-node", "2", self}, environment);
  auto second = start_launcher({"--nproc-per-node", "2", self}, environment);
  for (auto* job : {&first, &second}) {
    const auto status = job->wait(kLimit);
    ASSERT_TRUE(status.has_value()) << job->output();
    EXPECT_EQ(status->code, 0) << job->output();
  }
}

TEST(Run, AnOccupiedPortIsNamed) {
  const int fd = socket(AF_INET6, SOCK_STREAM, 0);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  socklen_t size = sizeof(address);
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), size) != 0) GTEST_SKIP() << "no IPv6 here";
  ASSERT_EQ(listen(fd, 1), 0);
  ASSERT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
  const auto port = std::to_string(ntohs(address.sin6_port));
  const auto run = run_launcher({"--master-port", port, "/bin/true"});
  close(fd);
  EXPECT_NE(run.code, 0);
  EXPECT_THAT(run.output, HasSubstr("port " + port));
}

TEST(Run, ARequestedPortIsUsedAndFreeAgainAfterAKill) {
  const auto port = std::to_string(testing::find_free_port());
  auto killed = start_launcher({"--master-port=" + port, "/bin/sh", "-c", "echo ready; exec sleep 1000"});
  ASSERT_TRUE(killed.wait_for_output("ready", kLimit)) << killed.output();
  killed.signal(SIGKILL);
  ASSERT_TRUE(killed.wait(kLimit).has_value());
  const auto run = run_launcher({"--master_port", port, "/bin/sh", "-c", "echo port $MASTER_PORT"});
  EXPECT_EQ(run.code, 0);
  EXPECT_THAT(run.output, HasSubstr("[default0]:port " + port + "\n"));
}

TEST(Run, WorkersGetTheVariablesOfTorchrun) {
  const std::string script =
      "echo $RANK,$LOCAL_RANK,$WORLD_SIZE,$LOCAL_WORLD_SIZE,$GROUP_RANK,$GROUP_WORLD_SIZE,$ROLE_RANK,$ROLE_NAME,"
      "$ROLE_WORLD_SIZE,$MASTER_ADDR,$TORCHELASTIC_RESTART_COUNT,$TORCHELASTIC_MAX_RESTARTS,"
      "$TORCHELASTIC_USE_AGENT_STORE,$TORCH_NCCL_ASYNC_ERROR_HANDLING,$MINE";
  const auto run =
      run_launcher({"--nproc-per-node", "2", "/bin/sh", "-c", script},
                   {{"RANK", "77"}, {"WORLD_SIZE", "99"}, {"LOCAL_RANK", "5"}, {"MASTER_PORT", "1"}, {"MINE", "kept"}});
  EXPECT_EQ(run.code, 0);
  EXPECT_THAT(run.output, HasSubstr("[default0]:0,0,2,2,0,1,0,default,2,127.0.0.1,0,0,True,1,kept\n"));
  EXPECT_THAT(run.output, HasSubstr("[default1]:1,1,2,2,0,1,1,default,2,127.0.0.1,0,0,True,1,kept\n"));
}

TEST(Run, OptionsTakeDashesUnderscoresAndVariables) {
  const Arguments program{"/bin/sh", "-c", "echo worker $RANK"};
  const auto workers = [&](Arguments options, const EnvironmentChanges& environment = {}) {
    options.insert(options.end(), program.begin(), program.end());
    return count(run_launcher(options, environment).output, "worker [0-9]");
  };
  EXPECT_EQ(workers({}), 1);
  EXPECT_EQ(workers({"--nproc-per-node=2"}), 2);
  EXPECT_EQ(workers({"--nproc_per_node", "2"}), 2);
  EXPECT_EQ(workers({}, {{"PET_NPROC_PER_NODE", "3"}}), 3);
  EXPECT_EQ(workers({"--nproc-per-node", "2"}, {{"PET_NPROC_PER_NODE", "3"}}), 2);
  EXPECT_EQ(workers({"--nproc-per-node", "cpu"}), static_cast<int>(std::thread::hardware_concurrency()));
}

TEST(Run, TheProgramsArgumentsAreItsOwn) {
  const auto run = run_launcher(
      {"--nproc-per-node", "1", "--", "/bin/echo", "--nproc-per-node", "9", "--", "${local_rank}x", "run"});
  EXPECT_EQ(run.code, 0);
  EXPECT_THAT(run.output, HasSubstr("[default0]:--nproc-per-node 9 -- 0x run\n"));
}

TEST(Run, ThreadsPerWorkerDefaultToOneAndSaySo) {
  const Arguments arguments{"--nproc-per-node", "2", "/bin/sh", "-c", "echo threads=$OMP_NUM_THREADS"};
  const auto unset = run_launcher(arguments);
  EXPECT_THAT(unset.output, HasSubstr("[default1]:threads=1\n"));
  EXPECT_THAT(unset.output, HasSubstr("OMP_NUM_THREADS is not set"));
  const auto set = run_launcher(arguments, {{"OMP_NUM_THREADS", "4"}});
  EXPECT_THAT(set.output, HasSubstr("[default1]:threads=4\n"));
  EXPECT_THAT(set.output, Not(HasSubstr("OMP_NUM_THREADS is not set")));
  EXPECT_THAT(run_launcher({"/bin/sh", "-c", "echo threads=$OMP_NUM_THREADS."}).output, HasSubstr("threads=.\n"));
}

RANKS_BODY(run_rank_1_exits_with_7) {
  init_process_group({.timeout = 600s});
  std::printf("pid %d\n", getpid());
  std::fflush(stdout);
  if (rank() == 1) _exit(7);
  kill(getpid(), SIGSTOP);  // as if blocked for good: notices neither the loss of the peer nor SIGTERM
}

TEST(Run, TheFirstFailureIsReportedAndTheOthersStopped) {
  const auto run = run_body("run_rank_1_exits_with_7", {"--nproc-per-node", "3", "--shutdown-timeout", "1"});
  EXPECT_EQ(run.code, 1);
  EXPECT_THAT(run.output, HasSubstr("first failure: rank 1 (pid "));
  EXPECT_EQ(count(run.output, "first failure: rank 1 \\(pid [0-9]+\\): exit code 7 at 2"), 1) << run.output;
  EXPECT_EQ(count(run.output, "after the stop: rank [02] \\(pid [0-9]+\\): signal 9 \\(SIGKILL\\)"), 2) << run.output;
  expect_gone(printed_pids(run.output));
}

TEST(Run, AKilledWorkerIsReportedBySignal) {
  const auto run = run_launcher({"--nproc-per-node", "3", "/bin/sh", "-c",
                                 "echo pid $$; if [ $RANK = 2 ]; then kill -9 $$; fi; exec sleep 1000"});
  EXPECT_EQ(run.code, 1);
  EXPECT_EQ(count(run.output, "first failure: rank 2 \\(pid [0-9]+\\): signal 9 \\(SIGKILL\\)"), 1) << run.output;
  EXPECT_EQ(count(run.output, "after the stop: rank [01] \\(pid [0-9]+\\): signal 15 \\(SIGTERM\\)"), 2) << run.output;
  expect_gone(printed_pids(run.output));
}

TEST(Run, WhatWorkersStartedIsStoppedToo) {
  const auto folder = std::filesystem::path(::testing::TempDir()) / ("fsdp_run_" + std::to_string(getpid()));
  std::filesystem::create_directories(folder);
  // Each worker starts a process that ignores SIGTERM; rank 0 fails once both of those run.
  const std::string script =
      "(trap '' TERM; exec sh -c 'echo pid $$; : > $DIR/$RANK; exec sleep 1000') &\n"
      "while [ ! -e $DIR/0 ] || [ ! -e $DIR/1 ]; do :; done\n"
      "[ $RANK = 0 ] && exit 3\n"
      "wait";
  const auto run = run_launcher({"--nproc-per-node", "2", "/bin/sh", "-c", script}, {{"DIR", folder.string()}});
  std::filesystem::remove_all(folder);
  EXPECT_EQ(run.code, 1);
  EXPECT_EQ(count(run.output, "first failure: rank 0 \\(pid [0-9]+\\): exit code 3"), 1) << run.output;
  EXPECT_EQ(printed_pids(run.output).size(), 4U);  // of the two processes, and of the two workers in the report
  expect_gone(printed_pids(run.output));
}

TEST(Run, ASignalIsPassedOn) {
  auto launcher =
      start_launcher({"--nproc-per-node", "2", "/bin/sh", "-c",
                      "trap 'echo worker got it; kill $child; exit 0' TERM; sleep 1000 & child=$!; echo pid $$; wait"});
  ASSERT_TRUE(launcher.wait_for_output("[default0]:pid", kLimit)) << launcher.output();
  ASSERT_TRUE(launcher.wait_for_output("[default1]:pid", kLimit)) << launcher.output();
  launcher.signal(SIGTERM);
  const auto status = launcher.wait(kLimit);
  ASSERT_TRUE(status.has_value()) << launcher.output();
  EXPECT_EQ(status->code, 128 + SIGTERM);
  EXPECT_EQ(count(launcher.output(), "worker got it"), 2) << launcher.output();
  expect_gone(printed_pids(launcher.output()));
}

TEST(Run, NoWorkerOutlivesAKilledLauncher) {
  auto launcher = start_launcher({"--nproc-per-node", "2", "/bin/sh", "-c", "echo pid $$; exec sleep 1000"});
  ASSERT_TRUE(launcher.wait_for_output("[default0]:pid", kLimit)) << launcher.output();
  ASSERT_TRUE(launcher.wait_for_output("[default1]:pid", kLimit)) << launcher.output();
  const auto pids = printed_pids(launcher.output());
  ASSERT_EQ(pids.size(), 2U);
  launcher.signal(SIGKILL);
  expect_gone(pids);
}

TEST(Run, MistakesAreToldBeforeAnythingStarts) {
  const std::vector<std::pair<Arguments, std::string>> cases{
      {{"--nproc-per-node", "2"}, "which program?"},
      {{"--nproc-per-node", "0", "/bin/true"}, "--nproc-per-node is \"0\""},
      {{"--nproc-per-node", "two", "/bin/true"}, "--nproc-per-node is \"two\""},
      {{"--nnodes", "2", "/bin/true"}, "starts one node"},
      {{"--no-such-option", "/bin/true"}, "--no-such-option"},
      {{"no-such-program-anywhere"}, "no program \"no-such-program-anywhere\" on the PATH"},
      {{std::string(300, 'x')}, "on the PATH"},
      {{"/no/such/file"}, "\"/no/such/file\" is not a program"}};
  for (const auto& [arguments, message] : cases) {
    const auto run = run_launcher(arguments);
    EXPECT_NE(run.code, 0) << message;
    EXPECT_THAT(run.output, HasSubstr(message));
  }
}

TEST(Run, LinesStayWholeAndUnendedOnesAppear) {
  const auto run = run_launcher({"--nproc-per-node", "2", "--role", "trainer", "/bin/sh", "-c",
                                 "for i in 1 2 3; do echo line $i; done; printf unended; echo problem >&2"});
  for (const auto* rank : {"0", "1"}) {
    const std::string prefix = std::string("\\[trainer") + rank + "\\]:";
    for (const auto* line : {"line 1", "line 2", "line 3", "unended", "problem"}) {
      EXPECT_EQ(count(run.output, prefix + line + "\n"), 1) << run.output;
    }
  }
}

}  // namespace
}  // namespace fsdp
