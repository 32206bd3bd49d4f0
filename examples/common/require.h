#pragma once
// How a lesson checks what it teaches: it fails when that is not so.
#include <fsdp/process_group.h>

#include <cstdlib>
#include <iostream>
#include <string>

namespace lesson {

inline void require(bool condition, const std::string& what) {
  if (condition) return;
  std::cerr << "rank " << fsdp::rank() << ": this lesson expected that " << what << std::endl;
  std::exit(1);
}

}  // namespace lesson
