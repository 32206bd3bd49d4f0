#pragma once
// How a tensor lies over one mesh dimension.
//
//   std::vector<fsdp::Placement> placements{fsdp::Replicate{}, fsdp::Shard{0}};   // one a mesh dim
//
// PyTorch: torch.distributed.tensor.placement_types.
#include <fsdp/version.h>

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace fsdp {

// Cut along tensor dimension `dim` as torch.chunk cuts: later ranks may hold fewer rows or none.
struct Shard {
  int64_t dim = 0;
  bool operator==(const Shard&) const = default;
};

// The same values on every rank.
struct Replicate {
  bool operator==(const Replicate&) const = default;
};

// Every rank holds a term; the value is their reduction.
struct Partial {
  std::string reduce_op = "sum";  // sum, avg, min, max, product; "norm" combines p-norms
  double norm_type = 2.0;         // only for "norm"
  bool operator==(const Partial&) const = default;
};

using Placement = std::variant<Shard, Replicate, Partial>;
using Placements = std::vector<Placement>;

[[nodiscard]] inline bool is_shard(const Placement& p) { return std::holds_alternative<Shard>(p); }
[[nodiscard]] inline bool is_replicate(const Placement& p) { return std::holds_alternative<Replicate>(p); }
[[nodiscard]] inline bool is_partial(const Placement& p) { return std::holds_alternative<Partial>(p); }

// "Shard(0)", "[Replicate, Shard(0)]"
[[nodiscard]] std::string to_string(const Placement& placement);
[[nodiscard]] std::string to_string(const Placements& placements);

}  // namespace fsdp
