#pragma once
// After a collective failed: where is everyone?
#include <fsdp/process_group.h>

#include <string>

namespace fsdp::comm {

// Writes what this rank waited for into the store of `group` and reads what the others wrote within a few seconds, at
// most a tenth of the group's timeout: "ranks [2] say nothing: gone, or still busy before it; rank 1 waited for
// reduce_scatter #7 of layers.3". Never throws.
[[nodiscard]] std::string whereabouts(const ProcessGroup& group, const std::string& waited_for);

}  // namespace fsdp::comm
