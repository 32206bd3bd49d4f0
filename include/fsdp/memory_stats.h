#pragma once
// Bytes held on this rank by sharding, by kind.
//
//   auto stats = fsdp::memory_stats(*model);
//   stats.gathered.peak;   // most bytes of gathered parameters alive at once
//
// PyTorch has no counterpart: FSDPMemTracker estimates what is counted here.
#include <fsdp/version.h>

#include <cstdint>

namespace torch::nn {
class Module;
}

namespace fsdp {

struct MemoryStats {
  struct Bytes {
    int64_t current = 0;
    int64_t peak = 0;
  };
  Bytes parameters;  // shards of parameters, padding included
  Bytes gradients;   // reduced gradients, padding included
  Bytes other;       // optimizer state and other sharded tensors
  Bytes gathered;    // gathered parameters
  Bytes buffers;     // communication buffers in flight

  // Collectives since the start.
  int64_t num_all_gathers = 0;
  int64_t num_reduce_scatters = 0;
  int64_t num_meetings = 0;  // gathers and reads that met the other ranks in the store first
};

[[nodiscard]] MemoryStats memory_stats(const torch::nn::Module& module);  // of the root that `module` belongs to
[[nodiscard]] MemoryStats memory_stats();                                 // of all roots of this process
void reset_peak_memory_stats(const torch::nn::Module& module);            // peaks start again from current

}  // namespace fsdp
