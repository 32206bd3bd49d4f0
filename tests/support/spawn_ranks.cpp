#include "support/spawn_ranks.h"

#include <arpa/inet.h>
#include <c10/util/Exception.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "support/run_ranks.h"

namespace fsdp::testing {
namespace {

constexpr const char* kBodyVariable = "FSDP_TEST_BODY";

std::map<std::string, std::function<void()>>& bodies() {
  static std::map<std::string, std::function<void()>> table;
  return table;
}

EnvironmentChanges rank_environment(int rank, int world_size, int port, const SpawnOptions& options) {
  EnvironmentChanges changes{{"RANK", std::to_string(rank)},
                             {"LOCAL_RANK", std::to_string(rank)},
                             {"WORLD_SIZE", std::to_string(world_size)},
                             {"LOCAL_WORLD_SIZE", std::to_string(world_size)},
                             {"MASTER_ADDR", "127.0.0.1"},
                             {"MASTER_PORT", std::to_string(port)},
                             {"TORCHELASTIC_USE_AGENT_STORE", options.agent_store ? "True" : "False"},
                             {"TORCHELASTIC_RUN_ID", std::nullopt},
                             {"TORCHELASTIC_RESTART_COUNT", std::nullopt},
                             {"OMP_NUM_THREADS", "1"}};
  for (const auto& [name, value] : options.environment) changes[name] = value;
  return changes;
}

std::string describe_status(const ExitStatus& status) {
  if (status.signal != 0) return "signal " + std::to_string(status.signal);
  return "exit code " + std::to_string(status.code);
}

}  // namespace

struct SpawnedRanks::Store {
  c10::intrusive_ptr<c10d::TCPStore> server;
};

bool SpawnResult::all_ok() const {
  return !timed_out && std::all_of(ranks.begin(), ranks.end(), [](const auto& rank) { return rank.status.code == 0; });
}

std::string SpawnResult::describe() const {
  std::string text = timed_out ? "killed at the time limit\n" : "";
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    text += "--- rank " + std::to_string(rank) + ": " + describe_status(ranks[rank].status) + "\n" + ranks[rank].output;
  }
  return text;
}

SpawnedRanks::SpawnedRanks(int world_size, const std::string& body, const SpawnOptions& options)
    : store_(std::make_unique<Store>()), deadline_(std::chrono::steady_clock::now() + options.limit) {
  TORCH_CHECK(bodies().contains(body), "no RANKS_BODY(", body, ")");
  int port = 0;
  if (options.agent_store) {
    c10d::TCPStoreOptions store_options;
    store_options.port = 0;
    store_options.isServer = true;
    store_options.waitWorkers = false;
    store_->server = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", store_options);
    port = store_->server->getPort();
  } else {
    port = find_free_port();
  }
  for (int rank = 0; rank < world_size; ++rank) {
    auto environment = rank_environment(rank, world_size, port, options);
    environment[kBodyVariable] = body;
    children_.push_back(
        std::make_unique<ChildProcess>(std::vector<std::string>{"/proc/self/exe"}, std::move(environment)));
  }
}

SpawnedRanks::~SpawnedRanks() = default;

SpawnResult SpawnedRanks::wait() {
  SpawnResult result;
  for (auto& child : children_) {
    const auto left = std::chrono::ceil<std::chrono::seconds>(deadline_ - std::chrono::steady_clock::now());
    result.timed_out |= !child->wait(std::max(left, std::chrono::seconds(0))).has_value();
  }
  for (auto& child : children_) {
    if (result.timed_out) child->kill_group();
    const auto status = child->wait(std::chrono::seconds(30));
    result.ranks.push_back({status.value_or(ExitStatus{}), child->output()});
  }
  return result;
}

SpawnResult spawn_ranks(int world_size, const std::string& body, const SpawnOptions& options) {
  return SpawnedRanks(world_size, body, options).wait();
}

int find_free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  const bool ok = bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  close(fd);
  TORCH_CHECK(ok, "no free port");
  return ntohs(address.sin_port);
}

bool register_ranks_body(const std::string& name, std::function<void()> body) {
  const bool added = bodies().emplace(name, std::move(body)).second;
  TORCH_CHECK(added, "two bodies are named ", name);
  return true;
}

std::optional<int> run_selected_body() {
  const char* name = std::getenv(kBodyVariable);  // NOLINT(concurrency-mt-unsafe)
  if (name == nullptr) return std::nullopt;
  try {
    bodies().at(name)();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", message_of(error).c_str());
    return 1;
  }
  return ::testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed() ? 1 : 0;
}

}  // namespace fsdp::testing
