// The table: which rule an operator follows. To teach the library a new op, add its name here.
//
// An entry is "name" (every overload) or "name.overload" (that one, looked up first); "name.overload" of an overload
// without a name is "name.". Ops without an entry are computed on the gathered tensor, which is always right.
#include <string_view>
#include <unordered_map>

#include "dtensor/op_facts.h"

namespace fsdp::dtensor {

namespace {

using Table = std::unordered_map<std::string, TableEntry>;

// Functional and in-place form follow the same rule.
constexpr std::string_view kPointwiseOps[] = {
    "add",          "sub",        "rsub",        "mul",         "div",         "addcmul",
    "addcdiv",      "lerp",       "sqrt",        "rsqrt",       "neg",         "abs",
    "sign",         "sgn",        "pow",         "square",      "maximum",     "minimum",
    "fmax",         "fmin",       "clamp",       "clamp_min",   "clamp_max",   "exp",
    "exp2",         "expm1",      "log",         "log2",        "log10",       "log1p",
    "reciprocal",   "floor",      "ceil",        "round",       "trunc",       "frac",
    "remainder",    "fmod",       "sin",         "cos",         "tan",         "tanh",
    "sigmoid",      "relu",       "gelu",        "silu",        "softplus",    "erf",
    "atan",         "atan2",      "hypot",       "eq",          "ne",          "lt",
    "le",           "gt",         "ge",          "isfinite",    "isinf",       "isnan",
    "isposinf",     "isneginf",   "logical_and", "logical_or",  "logical_not", "logical_xor",
    "bitwise_and",  "bitwise_or", "bitwise_not", "bitwise_xor", "nan_to_num",  "copysign",
    "xlogy",        "where",      "masked_fill", "copy",        "fill",        "zero",
    "clone",        "_to_copy",   "subtract",    "multiply",    "divide",      "true_divide",
    "floor_divide", "negative",   "absolute",    "clip",        "positive",    "special_xlog1py",
    "heaviside",    "acos",       "asin",        "cosh",        "sinh",        "erfc",
    "lgamma",
};
constexpr std::string_view kPointwiseExact[] = {
    "max.other", "max.out", "min.other", "min.out", "_fused_adam_", "_fused_sgd_", "_fused_adamw_", "_fused_adagrad_",
};
constexpr std::string_view kMetadataOps[] = {
    "requires_grad_",
    "retain_grad",
    "retains_grad",
    "_version",
    "is_leaf",
    "output_nr",
    "is_same_size",
    "result_type",
    "size",
    "stride",
    "is_complex",
    "is_floating_point",
    "is_signed",
    "is_inference",
    "numel",
    "sym_numel",
    "sym_size",
    "sym_stride",
    "dim",
    "is_contiguous",
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty_strided",
    "_backward",
    "is_neg",
    "is_conj",
    "resolve_conj",
    "resolve_neg",
    "is_distributed",
    "is_sparse",
    "is_set_to",
    "is_nested",
    "_has_same_storage_numel",
};
constexpr std::string_view kShapeOps[] = {"view_as", "expand_as", "reshape_as", "type_as", "to.other"};
constexpr std::string_view kRandomOps[] = {"normal_",    "uniform_",    "random_", "exponential_",
                                           "geometric_", "log_normal_", "cauchy_", "bernoulli_.float"};
// Ops that compute with parameters. Under mixed precision all their floating arguments take the parameter's dtype; so
// do those of pointwise ops. Not here: batch norm (its statistics are buffers that it changes without saying so), cat
// and stack (they promote), losses.
constexpr std::string_view kComputeOps[] = {
    "linear",
    "matmul",
    "mm",
    "bmm",
    "addmm",
    "addbmm",
    "baddbmm",
    "addmv",
    "mv",
    "dot",
    "outer",
    "inner",
    "bilinear",
    "einsum",
    "tensordot",
    "conv1d",
    "conv2d",
    "conv3d",
    "convolution",
    "_convolution",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "embedding",
    "embedding_bag",
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "native_group_norm",
    "rms_norm",
    "prelu",
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
    "scaled_dot_product_attention",
    "_transformer_encoder_layer_fwd",
    "_native_multi_head_attention",
};
// Every change of a handle's metadata in place would leave the shards behind.
constexpr std::string_view kMetadataWrites[] = {
    "t_",      "transpose_", "swapdims_",   "swapaxes_", "squeeze_", "unsqueeze_",
    "resize_", "resize_as_", "as_strided_", "rename_",   "swap_",
};

Table build_table() {
  Table table;
  const auto put = [&table](std::string_view name, TableEntry entry) { table["aten::" + std::string(name)] = entry; };
  for (const auto name : kPointwiseOps) {
    put(name, {Rule::kPointwise});
    put(std::string(name) + "_", {Rule::kPointwise});
  }
  for (const auto name : kPointwiseExact) put(name, {Rule::kPointwise});
  for (const auto name : kMetadataOps) put(name, {Rule::kMetadata});
  for (const auto name : kShapeOps) put(name, {Rule::kShape});
  for (const auto name : kRandomOps) put(name, {Rule::kRandom});
  for (const auto name : {"zeros_like", "ones_like", "full_like", "empty_like"}) put(name, {Rule::kLike});
  for (const auto name : {"rand_like", "randn_like", "randint_like"}) put(name, {Rule::kRandomLike});
  for (const auto name : {"detach", "alias", "lift_fresh"}) put(name, {Rule::kAlias});
  put("detach_", {Rule::kNothing});
  for (const auto name : {"to", "contiguous", "cpu", "lift"}) put(name, {Rule::kConvert});
  put("to.device", {Rule::kGather});  // what printing asks for before it reads the values
  put("is_pinned", {Rule::kLocal});
  put("stack", {Rule::kStack});
  put("_has_compatible_shallow_copy_type", {Rule::kShallowCopy});
  put("set_", {Rule::kSet});

  put("sum.", {Rule::kReduce, Reduction::kSum});
  put("mean.", {Rule::kReduce, Reduction::kMean});
  put("min.", {Rule::kReduce, Reduction::kMin});
  put("max.", {Rule::kReduce, Reduction::kMax});
  put("all.", {Rule::kReduce, Reduction::kAll});
  put("any.", {Rule::kReduce, Reduction::kAny});
  for (const auto name : {"norm.Scalar", "norm.ScalarOpt_dtype", "linalg_vector_norm.", "_foreach_norm.Scalar"})
    put(name, {Rule::kReduce, Reduction::kNorm});

  for (const auto name : kMetadataWrites)
    put(name, {Rule::kRefuse, Reduction::kNone,
               "it would change the shape of the handle and not of the shards; make a new tensor instead"});
  put("set_data", {Rule::kRefuse, Reduction::kNone, "assign values with copy_() under torch::NoGradGuard"});
  return table;
}

// _foreach_X is X for each tensor. (Others, such as _foreach_max and _foreach_mm, are no work part by part.)
bool is_foreach_of_pointwise(const Table& table, const std::string& name) {
  constexpr std::string_view kForeach = "aten::_foreach_";
  if (!name.starts_with(kForeach)) return false;
  const auto single = table.find("aten::" + name.substr(kForeach.size()));
  return single != table.end() && single->second.rule == Rule::kPointwise;
}

}  // namespace

bool casts_inputs(const std::string& name) {
  constexpr std::string_view kNamespace = "aten::";
  if (!name.starts_with(kNamespace)) return false;
  const auto own = std::string_view(name).substr(kNamespace.size());
  return std::find(std::begin(kComputeOps), std::end(kComputeOps), own) != std::end(kComputeOps);
}

TableEntry rule_of(const std::string& name, const std::string& overload) {
  static const Table table = build_table();
  const auto exact = table.find(name + "." + overload);
  if (exact != table.end()) return exact->second;
  const auto any = table.find(name);
  if (any != table.end()) return any->second;
  if (is_foreach_of_pointwise(table, name)) return {Rule::kPointwise};
  if (name.starts_with("c10d::"))
    return {Rule::kRefuse, Reduction::kNone,
            "collectives do not see shards; pass fsdp::DTensor(t).to_local() or full_tensor()"};
  return {};
}

}  // namespace fsdp::dtensor
