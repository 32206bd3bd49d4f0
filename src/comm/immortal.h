#pragma once
// A process-wide value that is never destroyed.
#include <new>
#include <utility>

namespace fsdp::comm {

// For function-local statics that other threads may still use while the process exits: a static destructor would pull
// process groups apart under the backend's own threads.
template <class T>
class Immortal {
 public:
  template <class... Args>
  explicit Immortal(Args&&... args) {
    new (static_cast<void*>(storage_)) T(std::forward<Args>(args)...);
  }
  Immortal(const Immortal&) = delete;
  Immortal& operator=(const Immortal&) = delete;
  ~Immortal() = default;

  [[nodiscard]] T& get() { return *std::launder(reinterpret_cast<T*>(storage_)); }

 private:
  alignas(T) unsigned char storage_[sizeof(T)];
};

}  // namespace fsdp::comm
