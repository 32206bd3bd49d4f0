#include "mesh/mesh_groups.h"

#include <numeric>

namespace fsdp::mesh {
namespace {

// [num_groups, group_size]: row i holds the ranks of group i.
at::Tensor rows_along(const at::Tensor& ranks, const std::vector<int64_t>& dims) {
  std::vector<int64_t> last(dims.size());
  std::iota(last.begin(), last.end(), ranks.dim() - static_cast<int64_t>(dims.size()));
  int64_t group_size = 1;
  for (const auto dim : dims) group_size *= ranks.size(dim);
  return ranks.movedim(dims, last).reshape({-1, group_size}).contiguous();
}

}  // namespace

ProcessGroup make_group_along(const at::Tensor& ranks, const std::vector<int64_t>& dims,
                              const std::string& description) {
  const auto rows = rows_along(ranks, dims);
  const int64_t num_ranks = rows.size(1);
  std::vector<int> everyone(world_size());
  std::iota(everyone.begin(), everyone.end(), 0);
  ProcessGroup own;
  for (int64_t row = 0; row < rows.size(0); ++row) {
    const auto* first = rows.data_ptr<int64_t>() + row * num_ranks;
    const std::vector<int> members(first, first + num_ranks);
    if (members == everyone) return default_group();
    if (auto group = new_group(members, description)) own = group;
  }
  return own;
}

}  // namespace fsdp::mesh
