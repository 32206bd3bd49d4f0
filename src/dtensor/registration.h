#pragma once
// Puts the dispatch rules on the wrapper key, once in a process.

#include <c10/core/DispatchKey.h>

namespace fsdp::dtensor {

// Before kernels go onto a dispatch key that LibTorch leaves free. Errors: c10::Error when somebody was there first.
void check_key_is_free(c10::DispatchKey key);

// Called by everything that makes a sharded tensor. Errors: c10::Error when another copy of the library got there
// first.
void ensure_dispatch_registered();

}  // namespace fsdp::dtensor
