#pragma once
// Puts the dispatch rules on the wrapper key, once in a process.

namespace fsdp::dtensor {

// Called by everything that makes a sharded tensor. Errors: c10::Error when another copy of the library got there
// first.
void ensure_dispatch_registered();

}  // namespace fsdp::dtensor
