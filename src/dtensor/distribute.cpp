// Making DTensors from plain tensors, and laying them out anew.
#include <fsdp/dtensor.h>

#include "comm/collectives.h"
#include "comm/group_state.h"
#include "comm/meeting.h"
#include "dtensor/gather.h"
#include "dtensor/layout.h"

namespace fsdp {

namespace {

using dtensor::PlainScope;

at::Tensor make_dtensor(const at::Tensor& local, at::IntArrayRef sizes, const DeviceMesh& mesh,
                        const Placements& placements, const char* path) {
  return dtensor::make_sharded(mesh, placements, local, sizes, path, std::make_shared<dtensor::Ledger>());
}

// gloo ends the process when ranks broadcast different sizes: compare first, so that all ranks get an error. What one
// mesh dim finds is passed on along the next, until the whole mesh knows.
void check_same_on_all_ranks(const at::Tensor& tensor, const DeviceMesh& mesh) {
  const std::string own = c10::str(tensor.scalar_type(), " ", tensor.sizes());
  std::string complaint;
  for (int64_t mesh_dim = 0; mesh_dim < mesh.ndim(); ++mesh_dim) {
    const std::string record = complaint.empty() ? own : complaint;
    const auto compare = [&](const std::string& theirs) -> std::string {
      if (record == theirs || !complaint.empty()) return complaint;
      if (theirs.starts_with("rank ")) return theirs;
      return c10::str("rank ", mesh.get_rank(), " has ", own, ", but another rank has ", theirs);
    };
    const auto meeting = comm::meeting_of(mesh.get_group(mesh_dim));
    const auto found = meeting->compare_with_rank0("tensor to distribute", record, compare);
    if (!found.empty()) complaint = found;
  }
  TORCH_CHECK_VALUE(complaint.empty(), "distribute_tensor: ", complaint, ": pass equal shapes and dtypes");
}

void broadcast_over(const at::Tensor& tensor, const DeviceMesh& mesh, int src_data_rank) {
  for (int64_t mesh_dim = 0; mesh_dim < mesh.ndim(); ++mesh_dim) {
    if (mesh.size(mesh_dim) == 1) continue;
    TORCH_CHECK_VALUE(src_data_rank >= 0 && src_data_rank < mesh.size(mesh_dim), "src_data_rank ", src_data_rank,
                      " is not a rank of mesh dim ", mesh_dim, " (size ", mesh.size(mesh_dim), ")");
    comm::broadcast(tensor, src_data_rank, mesh.get_group(mesh_dim), "distribute_tensor").wait();
  }
}

// This rank's term of a value that every rank holds whole.
at::Tensor as_partial(const at::Tensor& value, const Partial& partial, int64_t num_ranks) {
  if (partial.reduce_op == "sum") return value / num_ranks;
  const bool keeps = partial.reduce_op == "avg" || partial.reduce_op == "min" || partial.reduce_op == "max";
  TORCH_CHECK_VALUE(keeps, "a replicated tensor cannot become Partial(", partial.reduce_op,
                    "); possible: sum, avg, min, max");
  return value;
}

}  // namespace

DTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh, const Placements& placements,
                          std::optional<int> src_data_rank) {
  TORCH_CHECK_VALUE(tensor.defined(), "distribute_tensor() got an undefined tensor");
  TORCH_CHECK(!tensor.requires_grad() || tensor.is_leaf(),
              "distribute_tensor() of a tensor that is the result of an op and requires grad would cut it out of its "
              "graph: distribute the leaf, or detach() first");
  const auto checked = dtensor::checked_placements(placements, tensor.dim(), mesh);
  TORCH_CHECK_VALUE(!dtensor::any_partial(checked), "distribute_tensor() takes Shard and Replicate, got ",
                    to_string(placements));
  if (DTensor::is(tensor)) {
    const DTensor given(tensor);
    TORCH_CHECK_VALUE(given.device_mesh() == mesh && given.placements() == checked,
                      "distribute_tensor() got a DTensor laid out as ", to_string(given.placements()),
                      "; use redistribute() to lay it out as ", to_string(checked));
    return given;
  }
  const PlainScope plain;
  auto whole = tensor.detach().to(mesh.device_type()).contiguous();
  if (src_data_rank && mesh.size() > 1) {
    if (whole.is_alias_of(tensor)) whole = whole.clone();
    check_same_on_all_ranks(whole, mesh);
    broadcast_over(whole, mesh, *src_data_rank);
  }
  const auto local = dtensor::own_part(whole, tensor.sizes(), mesh, checked).clone(at::MemoryFormat::Contiguous);
  auto handle = make_dtensor(local, tensor.sizes(), mesh, checked, "distributed tensor");
  handle.set_requires_grad(tensor.requires_grad());
  return DTensor(handle);
}

DTensor DTensor::from_local(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements,
                            std::optional<std::vector<int64_t>> shape) {
  TORCH_CHECK_VALUE(local.defined(), "from_local() got an undefined tensor");
  TORCH_CHECK_TYPE(!is(local), "from_local() takes this rank's plain tensor, got a DTensor");
  const auto checked = dtensor::checked_placements(placements, local.dim(), mesh);
  const PlainScope plain;
  const auto part = local.detach().to(mesh.device_type());
  if (!shape) {
    shape = part.sizes().vec();
    for (size_t i = 0; i < checked.size(); ++i)
      if (const auto* shard = std::get_if<Shard>(&checked[i]))
        (*shape)[shard->dim] *= mesh.size(static_cast<int64_t>(i));
  } else {
    TORCH_CHECK_VALUE(static_cast<int64_t>(shape->size()) == part.dim(), "shape ", at::IntArrayRef(*shape), " has ",
                      shape->size(), " dims, the local tensor ", part.dim());
    const auto expected = dtensor::sizes_of(dtensor::own_extents(*shape, mesh, checked));
    TORCH_CHECK_VALUE(part.sizes() == at::IntArrayRef(expected), "of a tensor of shape ", at::IntArrayRef(*shape),
                      " laid out as ", to_string(checked), " this rank holds ", at::IntArrayRef(expected),
                      ", but the local tensor is ", part.sizes());
  }
  return DTensor(make_dtensor(part, *shape, mesh, checked, "tensor from local parts"));
}

DTensor DTensor::redistribute(const Placements& target) const {
  auto& state = *dtensor::state_of(tensor_);
  const auto& mesh = state.mesh;
  const auto checked = dtensor::checked_placements(target, tensor_.dim(), mesh);
  for (size_t i = 0; i < checked.size(); ++i)
    TORCH_CHECK(!is_partial(checked[i]) || !is_partial(state.placements[i]) || checked[i] == state.placements[i],
                "redistribute() cannot turn ", to_string(state.placements[i]), " into ", to_string(checked[i]));
  const PlainScope plain;
  auto copy = std::make_shared<dtensor::ShardState>(mesh, state.placements, state.local().clone(), state.path);
  if (checked == state.placements) {
    return DTensor(make_dtensor(copy->local(), tensor_.sizes(), mesh, checked, "redistributed tensor"));
  }
  dtensor::ShardState* only = copy.get();
  dtensor::reduce_partials(only, {"redistribute", &copy->path});
  dtensor::meet(*copy, "redistribute of " + state.path);
  auto value = dtensor::gather_full(*copy, tensor_.sizes());
  for (size_t i = 0; i < checked.size(); ++i)
    if (const auto* partial = std::get_if<Partial>(&checked[i]))
      value = as_partial(value, *partial, mesh.size(static_cast<int64_t>(i)));
  const auto local = dtensor::own_part(value, tensor_.sizes(), mesh, checked).clone(at::MemoryFormat::Contiguous);
  return DTensor(make_dtensor(local, tensor_.sizes(), mesh, checked, "redistributed tensor"));
}

}  // namespace fsdp
