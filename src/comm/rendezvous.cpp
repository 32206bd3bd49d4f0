#include "comm/rendezvous.h"

#include <c10/util/StringUtil.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/duration.h"
#include "comm/error_kinds.h"
#include "comm/immortal.h"

namespace fsdp::comm {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// The connection outlives destroy_process_group: were the host to close its server and open it again, a rank that is
// quicker than the host would join the old one.
struct StoreConnection {
  std::mutex mutex;
  std::string endpoint;
  StorePtr store;
  int num_inits = 0;

  // Frees a server's port.
  void forget() {
    store.reset();
    endpoint.clear();
  }

  // The part of the store for one more start of the job by this process.
  StorePtr next_start(const Environment& env, std::chrono::milliseconds timeout) {
    store->setTimeout(timeout);
    const std::string job = c10::str("fsdp/", env.run_id, "/", env.restart_count, "/");
    ++num_inits;
    // A launcher's store outlives this process, and a worker may run one program after another: count in the store.
    const auto init = env.use_agent_store ? store->add(c10::str(job, "inits/", env.rank), 1) : num_inits;
    return c10::make_intrusive<c10d::PrefixStore>(c10::str(job, init, "/"), store);
  }
};

StoreConnection& store_connection() {
  static Immortal<StoreConnection> connection;
  return connection.get();
}

[[noreturn]] void fail_to_reach_store(const Environment& env, std::chrono::milliseconds timeout,
                                      const std::exception& error) {
  C10_THROW_ERROR(DistNetworkError,
                  c10::str("rank ", env.rank, " cannot reach the store at ", env.master_addr, ":", env.master_port,
                           " (MASTER_ADDR, MASTER_PORT) within ", to_seconds(timeout), ": ", reason_of(error)));
}

StorePtr connect_store(const Environment& env, std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = env.master_port;
  options.isServer = env.rank == 0 && !env.use_agent_store;
  options.waitWorkers = false;
  options.timeout = timeout;
  try {
    return c10::make_intrusive<c10d::TCPStore>(env.master_addr, options);
  } catch (const std::exception& error) {
    const std::string reason = reason_of(error);
    if (options.isServer && reason.find("EADDRINUSE") != std::string::npos) {
      C10_THROW_ERROR(
          DistNetworkError,
          c10::str("rank 0 cannot host the store: port ", env.master_port,
                   " is in use (MASTER_PORT). Choose another, or let `fsdp run` find a free one. ", reason));
    }
    fail_to_reach_store(env, timeout, error);
  }
}

// One start of a job: who is there, and the one verdict that every rank gets.
class Gathering {
 public:
  Gathering(StorePtr store, const Environment& env, std::chrono::milliseconds timeout)
      : store_(std::move(store)), env_(env), timeout_(timeout) {}

  void join() {
    if (store_->add(rank_key(env_.rank), 1) > 1) contradict(c10::str("two processes have RANK=", env_.rank));
    check_world_size();
    if (store_->add("joined", 1) == env_.world_size) conclude("ok");
    const std::string verdict = await_verdict();
    if (verdict == "ok") return;
    TORCH_CHECK_VALUE(!verdict.starts_with("contradiction"), "rank ", env_.rank, ": ", verdict);
    C10_THROW_ERROR(DistStoreError, c10::str("rank ", env_.rank, ": ", verdict));
  }

 private:
  static std::string rank_key(int rank) { return c10::str("rank/", rank); }

  void check_world_size() {
    const std::string mine = std::to_string(env_.world_size);
    const std::string first = store_->compareSet("world_size", "", mine);
    if (first != mine)
      contradict(c10::str("WORLD_SIZE is ", mine, " on rank ", env_.rank, " but ", first, " on another rank"));
  }

  // This rank fails also when the others have concluded without it.
  [[noreturn]] void contradict(const std::string& what) {
    conclude("contradiction: " + what);
    C10_THROW_ERROR(ValueError, c10::str("rank ", env_.rank, ": contradiction: ", what));
  }

  void conclude(const std::string& verdict) { store_->compareSet("verdict", "", verdict); }

  std::string await_verdict() {
    try {
      store_->wait({"verdict"}, timeout_);
    } catch (const std::exception&) {
      conclude(describe_missing());
    }
    return store_->get_to_str("verdict");
  }

  std::string describe_missing() {
    std::vector<int> missing;
    for (int rank = 0; rank < env_.world_size; ++rank) {
      if (!store_->check({rank_key(rank)})) missing.push_back(rank);
    }
    return c10::str("ranks [", c10::Join(", ", missing), "] of ", env_.world_size, " did not join within ",
                    to_seconds(timeout_), ": look at their logs, and check WORLD_SIZE, MASTER_ADDR and MASTER_PORT");
  }

  StorePtr store_;
  const Environment& env_;
  std::chrono::milliseconds timeout_;
};

}  // namespace

StorePtr join_world(const Environment& env, std::chrono::milliseconds timeout) {
  auto& connection = store_connection();
  const std::lock_guard lock(connection.mutex);
  const std::string endpoint = c10::str(env.master_addr, ":", env.master_port, "/", env.rank);
  if (connection.endpoint != endpoint) {
    connection.forget();
    connection.store = connect_store(env, timeout);
    connection.endpoint = endpoint;
    connection.num_inits = 0;
  }
  try {
    auto store = connection.next_start(env, timeout);
    Gathering(c10::make_intrusive<c10d::PrefixStore>("join", store), env, timeout).join();
    return store;
  } catch (const c10::DistNetworkError& error) {
    connection.forget();  // its host is gone; the next attempt connects anew
    fail_to_reach_store(env, timeout, error);
  }
}

}  // namespace fsdp::comm
