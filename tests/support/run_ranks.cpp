#include "support/run_ranks.h"

#include <gtest/gtest.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace fsdp::testing {
namespace {

// What the threads of one run share.
class RankRun {
 public:
  explicit RankRun(int world_size) : num_running_(world_size) {}

  void finish(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (error && !first_error_) first_error_ = std::move(error);
    --num_running_;
    all_done_.notify_all();
  }

  [[nodiscard]] bool wait(std::chrono::seconds limit) {
    std::unique_lock lock(mutex_);
    return all_done_.wait_for(lock, limit, [this] { return num_running_ == 0; });
  }

  void rethrow() const {
    if (first_error_) std::rethrow_exception(first_error_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_done_;
  int num_running_;
  std::exception_ptr first_error_;
};

}  // namespace

void run_ranks(int world_size, const RankBody& body, std::chrono::milliseconds timeout, std::chrono::seconds limit) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  RankRun run(world_size);
  std::vector<std::thread> threads;
  threads.reserve(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        ProcessGroupOptions options;
        options.timeout = timeout;
        const auto group = make_process_group(store, rank, world_size, options);
        group->barrier()->wait();  // a rank whose body ends at once would close connections that others still make
        body(group, rank);
        run.finish(nullptr);
      } catch (...) {
        run.finish(std::current_exception());
      }
    });
  }
  if (!run.wait(limit)) {
    std::fprintf(stderr, "run_ranks: ranks still run after %lld s: this is a hang\n",
                 static_cast<long long>(limit.count()));
    std::_Exit(1);
  }
  for (auto& thread : threads) thread.join();
  run.rethrow();
}

std::string message_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
}

}  // namespace fsdp::testing
