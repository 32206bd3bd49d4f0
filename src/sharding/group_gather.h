#pragma once
// One gather of a group in flight, and what a group keeps between forward and backward instead of whole parameters.
#include "comm/collectives.h"
#include "comm/fingerprint.h"
#include "sharding/block_pool.h"

namespace fsdp::sharding {

struct Gather {
  Block row;   // uint8 [row_bytes]: what this rank sends, unless it sends its shards as they are
  Block rows;  // uint8 [num_ranks * row_bytes]; before `work`, which refers to it
  comm::PendingCollective work;
  uint32_t version = 0;  // of the shards at the start
  bool of_parts = false;
  std::optional<comm::Fingerprint> fingerprint;
  ProcessGroup group;
};

// This rank's share of a gathered block, sharded over a few neighbouring ranks.
struct Part {
  Block bytes;           // uint8 [share, then the fingerprint]
  uint32_t version = 0;  // of the shards
  ProcessGroup group;    // the neighbours
};

}  // namespace fsdp::sharding
