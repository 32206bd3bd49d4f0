#pragma once
// The record_function ranges of this process while a Ranges lives: what a profiler would see, in order.
//
//   const Ranges ranges;
//   net->forward(x);
//   EXPECT_EQ(Ranges::of_this_thread("FSDP::all_gather"), ...);   // this rank's, where ranks are threads
#include <ATen/record_function.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

namespace fsdp::testing {

// One at a time.
class Ranges {
 public:
  Ranges() {
    clear();
    handle_ = at::addGlobalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& range) -> std::unique_ptr<at::ObserverContext> {
          const std::lock_guard lock(mutex());
          all().push_back({at::RecordFunction::currentThreadId(), range.name()});
          return nullptr;
        }));
  }
  ~Ranges() { at::removeCallback(handle_); }
  Ranges(const Ranges&) = delete;
  Ranges& operator=(const Ranges&) = delete;

  [[nodiscard]] static bool has(const std::string& name) {
    const std::lock_guard lock(mutex());
    return std::any_of(all().begin(), all().end(), [&](const Range& range) { return range.name == name; });
  }
  // The names that start with `prefix`; it is cut off.
  [[nodiscard]] static std::vector<std::string> of_this_thread(const std::string& prefix) {
    const std::lock_guard lock(mutex());
    std::vector<std::string> names;
    for (const auto& [thread, name] : all())
      if (thread == at::RecordFunction::currentThreadId() && name.starts_with(prefix))
        names.push_back(name.substr(prefix.size()));
    return names;
  }
  static void forget_this_thread() {
    const std::lock_guard lock(mutex());
    std::erase_if(all(), [](const Range& range) { return range.thread == at::RecordFunction::currentThreadId(); });
  }

 private:
  struct Range {
    uint64_t thread;
    std::string name;
  };
  static void clear() {
    const std::lock_guard lock(mutex());
    all().clear();
  }
  // A callback is a plain function, so what it writes to is static.
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static std::vector<Range>& all() {
    static std::vector<Range> ranges;
    return ranges;
  }
  at::CallbackHandle handle_ = at::INVALID_CALLBACK_HANDLE;
};

}  // namespace fsdp::testing
