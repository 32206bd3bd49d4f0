#include "comm/error_kinds.h"

#include <c10/util/Exception.h>

namespace fsdp::comm {

std::string reason_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
}

bool is_misuse(const std::exception& error) {
  return dynamic_cast<const c10::ValueError*>(&error) != nullptr ||
         dynamic_cast<const c10::IndexError*>(&error) != nullptr ||
         dynamic_cast<const c10::TypeError*>(&error) != nullptr ||
         dynamic_cast<const c10::NotImplementedError*>(&error) != nullptr;
}

}  // namespace fsdp::comm
