#pragma once
// The ranks that train together: those of the default process group, or this one process on its own.
#include <fsdp/device_mesh.h>

#include <vector>

namespace fsdp::train {

class World {
 public:
  // One process, no process group.
  [[nodiscard]] static World alone() { return World(); }
  // The ranks of a 1-D mesh, this one at its place in it.
  [[nodiscard]] static World over(const DeviceMesh& mesh);
  // Every rank that a launcher started, through init_process_group. Errors: as that function.
  [[nodiscard]] static World join();
  // alone() unless a launcher set RANK or WORLD_SIZE.
  [[nodiscard]] static World from_environment();
  // The size that from_environment() will have, known before any rank is met; 0 when WORLD_SIZE is no number.
  [[nodiscard]] static int64_t announced_size();

  [[nodiscard]] bool is_alone() const { return !mesh_.defined(); }
  [[nodiscard]] bool is_first() const { return rank_ == 0; }
  [[nodiscard]] int64_t rank() const { return rank_; }
  [[nodiscard]] int64_t size() const { return size_; }
  [[nodiscard]] const DeviceMesh& mesh() const { return mesh_; }  // 1-D over all ranks; undefined when alone

  // Element by element over the ranks, equal on all of them. Collective.
  [[nodiscard]] std::vector<double> sum(const std::vector<double>& values) const;
  [[nodiscard]] std::vector<double> mean(const std::vector<double>& values) const;
  // Whether every rank passes the same number. Collective.
  [[nodiscard]] bool agrees(int64_t value) const;

 private:
  World() = default;

  DeviceMesh mesh_;
  int64_t rank_ = 0;
  int64_t size_ = 1;
};

}  // namespace fsdp::train
