// Meshes of real processes: groups, coordinates, slices, flatten.
#include <fsdp/device_mesh.h>
#include <gtest/gtest.h>

#include "comm/collectives.h"
#include "support/errors.h"
#include "support/run_ranks.h"
#include "support/spawn_ranks.h"

namespace fsdp {
namespace {

using testing::run_ranks;
using testing::spawn_ranks;
using Ints = std::vector<int64_t>;

// The sum of all global ranks of a group, by a collective over it.
int64_t sum_of_ranks(const DeviceMesh& mesh, const std::string& dim) {
  const auto value = torch::full({1}, mesh.get_rank(), torch::kLong);
  for (auto& pending : comm::all_reduce({value}, mesh.get_group(dim), "x")) pending.wait();
  return value.item<int64_t>();
}

RANKS_BODY(mesh_over_the_world) {
  const auto mesh = init_device_mesh(torch::kCPU, {2});  // initialises the default group
  EXPECT_TRUE(is_initialized());
  EXPECT_EQ(mesh.get_group(), default_group());
  EXPECT_EQ(mesh.ndim(), 1);
  EXPECT_EQ(mesh.size(), 2);
  EXPECT_EQ(mesh.get_local_rank(), rank());
  EXPECT_EQ(mesh.device_type(), torch::kCPU);
  EXPECT_TRUE(mesh.mesh_dim_names().empty());
  EXPECT_EQ(mesh.get_coordinate(), Ints({rank()}));
  EXPECT_ERROR(std::ignore = mesh.slice({"dp"}), c10::Error, "no mesh_dim_names");
  EXPECT_ERROR(std::ignore = mesh.flatten(), c10::Error, "no mesh_dim_names");
}

TEST(DeviceMesh, OverTheWorldReusesTheDefaultGroup) { EXPECT_ALL_RANKS_OK(spawn_ranks(2, "mesh_over_the_world")); }

RANKS_BODY(mesh_refusals) {
  init_process_group();
  EXPECT_ERROR(std::ignore = init_device_mesh("cpu:0", {2}), c10::Error, "\"cpu:0\" has an index");
  EXPECT_ERROR(std::ignore = init_device_mesh("nonsense", {2}), c10::Error, "nonsense");
  EXPECT_ERROR(std::ignore = init_device_mesh("cpu", {2, 1}, {"dp", "dp"}), c10::Error, "a name twice: dp, dp");
  EXPECT_ERROR(std::ignore = init_device_mesh("cpu", {2, 1}, {"dp"}), c10::Error,
               "has 1 names (dp), but the mesh has 2");
  EXPECT_ERROR(std::ignore = init_device_mesh("cpu", {2, 2}), c10::Error, "needs 4 ranks, but the world has 2");
  EXPECT_ERROR(std::ignore = init_device_mesh("cpu", {}), c10::ValueError, "shape is empty");
  EXPECT_ERROR(std::ignore = init_device_mesh("cpu", {2, 0}), c10::ValueError, "a dim below 1");
  EXPECT_ERROR(std::ignore = DeviceMesh().size(), c10::ValueError, "undefined");
}

TEST(DeviceMesh, RefusesWhatMakesNoSense) { EXPECT_ALL_RANKS_OK(spawn_ranks(2, "mesh_refusals")); }

RANKS_BODY(mesh_two_dims) {
  const auto mesh = init_device_mesh("cpu", {2, 2}, {"dp", "cp"});
  const int own = rank();
  EXPECT_EQ(mesh.shape(), Ints({2, 2}));
  EXPECT_TRUE(torch::equal(mesh.mesh(), torch::arange(4).view({2, 2})));
  EXPECT_EQ(mesh.size(0), 2);
  EXPECT_EQ(mesh.size(-1), 2);
  EXPECT_EQ(mesh.get_coordinate(), Ints({own / 2, own % 2}));
  EXPECT_EQ(mesh.get_local_rank("dp"), own / 2);
  EXPECT_EQ(mesh.get_local_rank(1), own % 2);
  EXPECT_ERROR(std::ignore = mesh.get_local_rank(), c10::Error, "2 dims of shape (2, 2): say which one");
  EXPECT_ERROR(std::ignore = mesh.get_group(), c10::Error, "say which one");
  EXPECT_ERROR(std::ignore = mesh.get_group("tp"), c10::IndexError, "no dim named \"tp\"; its names: dp, cp");
  EXPECT_ERROR(std::ignore = mesh.size(2), c10::IndexError, "mesh dim 2 is outside a mesh of 2 dims");
  EXPECT_EQ(sum_of_ranks(mesh, "dp"), 2 * (own % 2) + 2);
  EXPECT_EQ(sum_of_ranks(mesh, "cp"), own < 2 ? 1 : 5);
  EXPECT_EQ(mesh.get_group("dp")->getGroupDesc(), "mesh_dp");

  const auto dp = mesh["dp"];
  EXPECT_EQ(dp.get_group(), mesh.get_group("dp"));  // shared, not made anew
  EXPECT_TRUE(torch::equal(dp.mesh(), torch::tensor({own % 2, own % 2 + 2}, torch::kLong)));
  EXPECT_EQ(dp.get_rank(), own);
  EXPECT_EQ(dp.get_local_rank(), own / 2);
  EXPECT_EQ(dp["dp"], dp);
  EXPECT_EQ(mesh.slice({"dp", "cp"}), mesh);
  EXPECT_ERROR(std::ignore = mesh.slice({"cp", "dp"}), c10::IndexError, "order of the mesh: dp, cp");
  EXPECT_ERROR(std::ignore = mesh["tp"], c10::IndexError, "no dim named \"tp\"");
  EXPECT_ERROR(std::ignore = mesh.slice({}), c10::IndexError, "no name given");
  EXPECT_ERROR(std::ignore = dp["cp"], c10::IndexError, "no dim named \"cp\"; its names: dp");
}

TEST(DeviceMesh, TwoDimsHaveTheirGroupsAndSlices) { EXPECT_ALL_RANKS_OK(spawn_ranks(4, "mesh_two_dims")); }

RANKS_BODY(mesh_smaller_than_the_world) {
  init_process_group();
  const auto mesh = init_device_mesh("cpu", {1, 2}, {"dp", "tp"});
  EXPECT_EQ(mesh.get_coordinate().has_value(), rank() < 2);
  if (rank() < 2) {
    EXPECT_EQ(mesh["tp"].get_local_rank(), rank());
    EXPECT_EQ(mesh.get_group("dp")->getSize(), 1);
    return;
  }
  EXPECT_ERROR(std::ignore = mesh.get_local_rank("tp"), c10::Error, "rank 2 is not in the mesh");
  EXPECT_ERROR(std::ignore = mesh.get_group("tp"), c10::Error, "rank 2 is not in the mesh");
  EXPECT_EQ(mesh["tp"].get_coordinate(), std::nullopt);
}

TEST(DeviceMesh, ARankOutsideHasNoCoordinate) { EXPECT_ALL_RANKS_OK(spawn_ranks(3, "mesh_smaller_than_the_world")); }

RANKS_BODY(mesh_flatten) {
  const auto mesh = init_device_mesh("cpu", {2, 2, 1}, {"dp", "cp", "tp"});
  const auto flat = mesh.slice({"dp", "cp"}).flatten();
  EXPECT_EQ(flat.mesh_dim_names(), std::vector<std::string>{"dp_cp"});
  EXPECT_EQ(flat.size(), 4);
  EXPECT_TRUE(torch::equal(flat.mesh(), torch::arange(4)));
  EXPECT_EQ(flat.get_group(), default_group());
  EXPECT_EQ(mesh["dp_cp"], flat);  // from the root
  EXPECT_EQ(mesh.slice({"dp_cp", "tp"}).shape(), Ints({4, 1}));
  EXPECT_ERROR(std::ignore = mesh.slice({"dp_cp", "cp"}), c10::Error, "cover the same dim");

  const auto cp_tp = mesh.slice({"cp", "tp"}).flatten("inner");
  EXPECT_EQ(cp_tp.size(), 2);
  EXPECT_EQ(cp_tp.get_local_rank(), mesh.get_local_rank("cp"));
  EXPECT_EQ(mesh.slice({"cp", "tp"}).flatten("inner").get_group(), cp_tp.get_group());  // not made twice
  EXPECT_EQ(sum_of_ranks(mesh, "dp"), sum_of_ranks(mesh["dp"], "dp"));
  EXPECT_ERROR(std::ignore = mesh.slice({"dp", "cp"}).flatten("inner"), c10::ValueError, "belongs to other dims");
  EXPECT_ERROR(std::ignore = mesh.slice({"dp", "cp"}).flatten("tp"), c10::ValueError, "belongs to other dims");
  EXPECT_EQ(mesh["dp"].flatten(), mesh["dp"]);
  EXPECT_EQ(mesh["dp"].flatten("dp"), mesh["dp"]);
  EXPECT_EQ(mesh.flatten().mesh_dim_names()[0], "dp_cp_tp");
}

TEST(DeviceMesh, FlattenGivesOneGroupOverSeveralDims) { EXPECT_ALL_RANKS_OK(spawn_ranks(4, "mesh_flatten")); }

RANKS_BODY(mesh_from_groups) {
  init_process_group();
  const auto own = rank();
  const auto mesh = init_device_mesh("cpu", {2, 2}, {"dp", "cp"});
  const std::vector<ProcessGroup> groups{mesh.get_group("dp"), mesh.get_group("cp")};
  const auto again = DeviceMesh::from_group(groups, torch::kCPU, mesh.mesh(), {"dp", "cp"});
  EXPECT_EQ(again, mesh);
  EXPECT_EQ(again.get_group("cp"), mesh.get_group("cp"));
  EXPECT_EQ(again.flatten().size(), 4);

  const auto one = DeviceMesh::from_group(mesh.get_group("dp"), torch::kCPU, {"dp"});
  EXPECT_EQ(one.get_rank(), own);  // the global one
  EXPECT_TRUE(torch::equal(one.mesh(), mesh["dp"].mesh()));
  EXPECT_EQ(one, mesh["dp"]);

  EXPECT_ERROR(std::ignore = DeviceMesh::from_group({}, torch::kCPU, mesh.mesh(), {}), c10::ValueError, "empty");
  EXPECT_ERROR(std::ignore = DeviceMesh::from_group(groups, torch::kCPU, torch::arange(4), {"dp", "cp"}),
               c10::ValueError, "one group a dim");
  EXPECT_ERROR(std::ignore = DeviceMesh::from_group(groups, torch::kCPU, mesh.mesh(), {"dp"}), c10::ValueError,
               "as many names");
  EXPECT_ERROR(std::ignore = DeviceMesh::from_group(groups, torch::kCPU, mesh.mesh().t(), {"dp", "cp"}),
               c10::ValueError, "has ranks");
  EXPECT_ERROR(std::ignore = DeviceMesh::from_group(groups, torch::kCPU, torch::arange(6).view({3, 2}), {"dp", "cp"}),
               c10::ValueError, "has 2 ranks, but the mesh has 3");
  EXPECT_ERROR(std::ignore = DeviceMesh::from_group(ProcessGroup(), torch::kCPU), c10::ValueError, "null");
  EXPECT_ERROR(
      std::ignore = DeviceMesh::from_group({groups[0], ProcessGroup()}, torch::kCPU, mesh.mesh(), {"dp", "cp"}),
      c10::ValueError, "mesh dim 1 is null");
}

// Each rank knows the part that holds it; a group over it would be another list of ranks on every part.
RANKS_BODY(mesh_over_a_part) {
  const auto mesh = init_device_mesh("cpu", {2, 2, 1}, {"pp", "dp", "cp"});
  const auto part = DeviceMesh::from_group({mesh.get_group("cp"), mesh.get_group("dp")}, torch::kCPU,
                                           mesh["dp"].mesh().view({1, 2}), {"replicate", "shard"});
  EXPECT_ERROR(std::ignore = part.flatten(), c10::Error, "not those of the default one");
  EXPECT_EQ(sum_of_ranks(mesh.slice({"dp", "cp"}).flatten("all"), "all"), rank() < 2 ? 1 : 5);
}

TEST(DeviceMesh, APartOfTheWorldMakesNoGroups) { EXPECT_ALL_RANKS_OK(spawn_ranks(4, "mesh_over_a_part")); }

TEST(DeviceMesh, FromGroupsThatExist) { EXPECT_ALL_RANKS_OK(spawn_ranks(4, "mesh_from_groups")); }

TEST(DeviceMesh, FromAGroupOfThreadsNeedsNoDefaultGroup) {
  run_ranks(2, [](const ProcessGroup& group, int rank) {
    const auto mesh = DeviceMesh::from_group(group, torch::kCPU, {"dp"});
    EXPECT_FALSE(is_initialized());
    EXPECT_EQ(mesh.get_rank(), rank);
    EXPECT_EQ(mesh.get_local_rank("dp"), rank);
    EXPECT_EQ(sum_of_ranks(mesh, "dp"), 1);
    EXPECT_EQ(mesh.flatten("dp"), mesh);
  });
}

TEST(DeviceMesh, EqualityAndHashFollowRanksTypeAndNames) {
  run_ranks(1, [](const ProcessGroup& group, int) {
    const auto make = [&](c10::DeviceType type, const std::vector<std::string>& names) {
      return DeviceMesh::from_group(group, type, names);
    };
    const auto mesh = make(torch::kCPU, {"dp"});
    EXPECT_EQ(mesh, make(torch::kCPU, {"dp"}));
    EXPECT_EQ(mesh.hash(), make(torch::kCPU, {"dp"}).hash());
    EXPECT_FALSE(mesh == make(torch::kCPU, {"cp"}));
    EXPECT_FALSE(mesh == make(torch::kCPU, {}));
    EXPECT_FALSE(mesh == make(torch::kCUDA, {"dp"}));
    const auto grid =
        DeviceMesh::from_group({group, group}, torch::kCPU, torch::zeros({1, 1}, torch::kLong), {"dp", "cp"});
    EXPECT_FALSE(grid == grid["dp"]);
    EXPECT_EQ(grid["dp"], mesh);
    EXPECT_FALSE(mesh == DeviceMesh());
    EXPECT_EQ(DeviceMesh(), DeviceMesh());
  });
}

}  // namespace
}  // namespace fsdp
