#pragma once
// DTensor: a typed handle on a torch::Tensor whose values are spread over a mesh.
//
//   auto w = fsdp::distribute_tensor(torch::randn({5, 3}), mesh, {fsdp::Shard{0}});
//   w.tensor().sizes();   // always the global shape: [5, 3]
//   w.to_local();         // this rank's rows: [3, 3] on rank 0 of 2, [2, 3] on rank 1
//   w.full_tensor();      // [5, 3], gathered; every rank calls it
//
// The tensor itself behaves everywhere as the full one; see docs/dtensor.md. PyTorch: torch.distributed.tensor.DTensor.
#include <fsdp/device_mesh.h>
#include <fsdp/placement.h>

#include <optional>

namespace fsdp {

class DTensor {
 public:
  // Errors: c10::TypeError when `tensor` is not sharded.
  explicit DTensor(at::Tensor tensor);
  [[nodiscard]] static bool is(const at::Tensor& tensor);

  // Wraps this rank's part. Without `shape` the global size is local x mesh size on sharded dims, which is wrong for
  // uneven shards: pass `shape` there. Errors: c10::TypeError for a DTensor, c10::ValueError for a shape that this
  // rank's part does not fit.
  static DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements,
                            std::optional<std::vector<int64_t>> shape = std::nullopt);

  [[nodiscard]] const at::Tensor& tensor() const { return tensor_; }
  operator at::Tensor() const { return tensor_; }  // NOLINT(google-explicit-constructor)

  [[nodiscard]] const DeviceMesh& device_mesh() const;
  [[nodiscard]] const Placements& placements() const;

  // This rank's part, sharing memory with the DTensor; waits for a gradient still in flight. No communication.
  [[nodiscard]] at::Tensor to_local() const;
  // The whole value on every rank. Collective: every rank of the mesh calls it.
  [[nodiscard]] at::Tensor full_tensor() const;
  // The same value under other placements, as a new DTensor. Collective.
  [[nodiscard]] DTensor redistribute(const Placements& placements) const;

 private:
  at::Tensor tensor_;
};

// Cuts `tensor` over `mesh`. The values of mesh rank `src_data_rank` are used everywhere; std::nullopt: each rank cuts
// its own copy, without communication. Errors: c10::ValueError for wrong placements, c10::Error for a non-leaf that
// requires grad.
[[nodiscard]] DTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh, const Placements& placements,
                                        std::optional<int> src_data_rank = 0);

}  // namespace fsdp
