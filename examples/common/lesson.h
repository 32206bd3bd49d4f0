#pragma once
// The frame of a lesson: it checks what it teaches, and ends with a sentence and exit code 1 when that is not so.
//
//   int main() { return lesson::run([] { ...; lesson::require(last < first, "the loss falls"); }); }
#include <c10/util/Exception.h>

#include <functional>
#include <iostream>
#include <stdexcept>
#include <string>

namespace lesson {

inline void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("this lesson expected that " + what);
}

// The exit code. `fsdp run` says which rank's line it is.
inline int run(const std::function<void()>& body) {
  try {
    body();
    return 0;
  } catch (const c10::Error& error) {
    std::cerr << "error: " << error.what_without_backtrace() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << std::endl;
  }
  return 1;
}

}  // namespace lesson
