#include "attention/attention_checks.h"

#include <ATen/autocast_mode.h>
#include <fsdp/dtensor.h>

#include "comm/group_state.h"

namespace fsdp::attention {

void check_sequence_mesh(const DeviceMesh& mesh, const char* function) {
  TORCH_CHECK_VALUE(mesh.defined(), function, ": the mesh is undefined; a 1-D mesh is needed, such as mesh[\"cp\"]");
  TORCH_CHECK_VALUE(mesh.ndim() == 1, function, ": the mesh has ", mesh.ndim(), " dims (shape ",
                    at::IntArrayRef(mesh.shape()), "), but a sequence is cut along one: pass mesh[\"cp\"]");
}

int64_t checked_seq_dim(const std::string& title, const at::Tensor& tensor, int64_t seq_dim) {
  const auto ndim = tensor.dim();
  TORCH_CHECK_INDEX(seq_dim >= -ndim && seq_dim < ndim, title, ": seq_dim ", seq_dim, " of a tensor of ", ndim,
                    " dims");
  return seq_dim < 0 ? seq_dim + ndim : seq_dim;
}

namespace {

void check_input(const at::Tensor& tensor, const char* name, const DeviceMesh& mesh, const char* function) {
  TORCH_CHECK_VALUE(tensor.defined(), function, ": ", name, " is undefined");
  TORCH_CHECK_TYPE(!DTensor::is(tensor), function, ": ", name,
                   " is a DTensor; pass this rank's rows as a plain tensor: to_local()");
  TORCH_CHECK_VALUE(tensor.dim() == 4, function, ": ", name, " has ", tensor.dim(), " dims (", tensor.sizes(),
                    "), but [batch, heads, tokens, head_dim] is needed");
  TORCH_CHECK_VALUE(at::isFloatingType(tensor.scalar_type()), function, ": ", name, " is ", tensor.scalar_type(),
                    ", but a floating dtype is needed");
  TORCH_CHECK_VALUE(tensor.device().type() == mesh.device_type(), function, ": ", name, " is on ", tensor.device(),
                    ", but the mesh is of ", mesh.device_type());
  TORCH_CHECK_VALUE(tensor.size(0) >= 1 && tensor.size(1) >= 1 && tensor.size(3) >= 1, function, ": ", name,
                    " has sizes ", tensor.sizes(), ": batch, heads and head_dim must not be 0");
}

void check_together(const AttentionInputs& inputs, const AttentionSettings& settings) {
  const auto& [q, k, v] = inputs;
  const auto* function = settings.function;
  TORCH_CHECK_VALUE(q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type(), function,
                    ": q, k and v are ", q.scalar_type(), ", ", k.scalar_type(), " and ", v.scalar_type(),
                    ", but must have one dtype");
  TORCH_CHECK_VALUE(q.device() == k.device() && q.device() == v.device(), function, ": q, k and v are on ", q.device(),
                    ", ", k.device(), " and ", v.device(), ", but must be on one device");
  TORCH_CHECK_VALUE(k.sizes() == v.sizes(), function, ": k has sizes ", k.sizes(), " and v ", v.sizes(),
                    ", but they must be equal");
  TORCH_CHECK_VALUE(q.size(0) == k.size(0) && q.size(3) == k.size(3), function, ": q has sizes ", q.sizes(), " and k ",
                    k.sizes(), ", but batch and head_dim must be equal");
  if (settings.enable_gqa) {
    TORCH_CHECK_VALUE(q.size(1) % k.size(1) == 0, function, ": ", q.size(1), " query heads are no multiple of ",
                      k.size(1), " key/value heads");
  } else {
    TORCH_CHECK_VALUE(q.size(1) == k.size(1), function, ": ", q.size(1), " query heads and ", k.size(1),
                      " key/value heads: set enable_gqa when groups of query heads share one");
  }
}

SequenceShards checked_shards_of(const AttentionInputs& inputs, int64_t rank, int64_t num_ranks,
                                 const AttentionSettings& settings) {
  const auto num_keys = inputs.num_keys();
  const auto length = settings.sequence_length.value_or(num_keys * num_ranks);
  TORCH_CHECK_VALUE(length >= 1, settings.function, ": the sequence has ", length, " tokens (k has sizes ",
                    inputs.k.sizes(), ")");
  const SequenceShards shards{length, num_ranks, settings.split};
  const auto expected = shards.num_rows(rank);
  const bool given = settings.sequence_length.has_value();
  TORCH_CHECK_VALUE(num_keys == expected, settings.function, ": k has ", num_keys, " tokens, but rank ", rank, " of ",
                    num_ranks, " holds ", expected, " of a sequence of ", length,
                    given ? " (see num_local_tokens)" : ": pass sequence_length where ranks hold different numbers");
  return shards;
}

}  // namespace

SequenceGroup checked_sequence_group(const AttentionInputs& inputs, const DeviceMesh& mesh,
                                     const AttentionSettings& settings) {
  check_sequence_mesh(mesh, settings.function);
  check_input(inputs.q, "q", mesh, settings.function);
  check_input(inputs.k, "k", mesh, settings.function);
  check_input(inputs.v, "v", mesh, settings.function);
  check_together(inputs, settings);
  TORCH_CHECK_NOT_IMPLEMENTED(!settings.is_causal || inputs.num_queries() == inputs.num_keys(), settings.function,
                              ": causal attention with ", inputs.num_queries(), " queries and ", inputs.num_keys(),
                              " keys on this rank; it needs equal numbers");
  const auto rank = mesh.get_local_rank();
  return {mesh.get_group(), rank, checked_shards_of(inputs, rank, mesh.size(), settings)};
}

void agree_on_call(const AttentionInputs& inputs, const SequenceGroup& sequence, const AttentionSettings& settings,
                   const std::string& details) {
  if (sequence.num_ranks() == 1) return;
  const auto& [q, k, v] = inputs;
  const bool has_graph = at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad());
  const bool is_head_tail = settings.split == SequenceSplit::kHeadTail;
  comm::meet_on_change_to(
      c10::str("run ", settings.function, " of ", q.size(0), " x ", q.size(1), " heads (", k.size(1), " of keys) x ",
               sequence.shards.length, " tokens x ", q.size(3), " ", q.scalar_type(),
               is_head_tail ? ", head-tail" : ", contiguous", settings.is_causal ? ", causal" : ", not causal",
               settings.scale ? c10::str(", scale ", *settings.scale) : std::string(), details,
               has_graph ? "" : ", without gradients"),
      sequence.group);
}

AttentionInputs autocast_inputs(const AttentionInputs& inputs) {
  if (!inputs.q.defined() || !inputs.k.defined() || !inputs.v.defined()) return inputs;  // refused afterwards
  const auto device = inputs.q.device().type();
  if (!at::autocast::is_autocast_available(device) || !at::autocast::is_autocast_enabled(device)) return inputs;
  const auto dtype = at::autocast::get_autocast_dtype(device);
  const auto cast = [&](const at::Tensor& tensor) { return at::autocast::cached_cast(dtype, tensor, device); };
  return {cast(inputs.q), cast(inputs.k), cast(inputs.v)};
}

}  // namespace fsdp::attention
