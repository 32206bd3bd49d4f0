#pragma once
// Checks of numbers that users gave: check_at_least("seq_len", seq_len, 1).
#include <c10/util/Exception.h>

#include <cstdint>

namespace fsdp::train {

// Errors: c10::ValueError naming the option, what it may be and what it is.
inline void check_at_least(const char* name, int64_t value, int64_t least) {
  TORCH_CHECK_VALUE(value >= least, name, " must be at least ", least, ", but is ", value);
}

}  // namespace fsdp::train
