#pragma once
// Backends by name.
#include <fsdp/process_group.h>

namespace fsdp::comm {

struct BackendSpec {
  std::string name;
  std::vector<c10::DeviceType> device_types;
  BackendFactory factory;
};

// Errors: c10::ValueError listing the known names when `name` is not among them.
[[nodiscard]] BackendSpec find_backend(const std::string& name);

}  // namespace fsdp::comm
