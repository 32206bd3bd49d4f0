#include "parallel/ddp_parameters.h"

#include <fsdp/dtensor.h>
#include <torch/nn/modules/embedding.h>

#include <set>
#include <sstream>

#include "mesh/agreement.h"
#include "mesh/sequence_scope.h"
#include "sharding/module_tree.h"

namespace fsdp::parallel {
namespace {

using TensorSet = std::set<const c10::TensorImpl*>;

void add_if_sparse(const torch::nn::Module& given, TensorSet& sparse) {
  const auto& module = unwrapped(given);
  const auto* embedding = module.as<torch::nn::Embedding>();
  const auto* bag = module.as<torch::nn::EmbeddingBag>();
  if (embedding && embedding->options.sparse()) sparse.insert(embedding->weight.unsafeGetTensorImpl());
  if (bag && bag->options.sparse()) sparse.insert(bag->weight.unsafeGetTensorImpl());
}

TensorSet sparse_parameters(const torch::nn::Module& root) {
  TensorSet sparse;
  add_if_sparse(root, sparse);
  for (const auto& module : root.modules(/*include_self=*/false)) add_if_sparse(*module, sparse);
  return sparse;
}

void check_parameter(const std::string& path, const at::Tensor& tensor, c10::DeviceType device_type) {
  TORCH_CHECK_VALUE(!DTensor::is(tensor), "DistributedDataParallel: parameter '", path,
                    "' is sharded already, by fully_shard or replicate; a module is wrapped by one of them");
  TORCH_CHECK_VALUE(!tensor.is_meta(), "DistributedDataParallel: parameter '", path,
                    "' is on the meta device; give the module values first");
  TORCH_CHECK_VALUE(tensor.device().type() == device_type, "DistributedDataParallel: parameter '", path, "' is on ",
                    tensor.device(), " and the mesh on ", device_type, "; move the module first");
  TORCH_CHECK_VALUE(!is_reduced_already(tensor), "DistributedDataParallel: parameter '", path,
                    "' is in a DistributedDataParallel already; wrap a module once");
}

void list_tensor(std::ostream& out, const char* kind, const std::string& path, const at::Tensor& tensor) {
  out << kind << " " << path << " " << tensor.sizes() << " " << tensor.scalar_type() << " strides " << tensor.strides()
      << "\n";
}

std::string structure_of(const DdpParameters& parameters, const torch::nn::Module& module,
                         const DistributedDataParallelOptions& options) {
  std::ostringstream text;
  for (const auto& parameter : parameters.trained)
    list_tensor(text, parameter.has_sparse_gradient ? "sparse parameter" : "parameter", parameter.path,
                parameter.tensor);
  for (const auto& parameter : parameters.frozen)
    list_tensor(text, "frozen parameter", parameter.path, parameter.tensor);
  for (const auto& item : module.named_buffers())
    if (item.value().defined() && !mesh::SequenceScope::splits(item.value()))
      list_tensor(text, "buffer", item.key(), item.value());
  text << "bucket_cap_mb " << options.bucket_cap_mb.value_or(0) << ", find_unused_parameters "
       << options.find_unused_parameters << ", broadcast_buffers " << options.broadcast_buffers << ", init_sync "
       << options.init_sync << ", static_graph " << options.static_graph << "\n";
  return text.str();
}

}  // namespace

DdpParameters ddp_parameters(const torch::nn::Module& module, c10::DeviceType device_type) {
  DdpParameters parameters;
  const auto sparse = sparse_parameters(module);
  TensorSet seen;
  for (const auto& item : module.named_parameters()) {
    const auto& tensor = item.value();
    if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    check_parameter(item.key(), tensor, device_type);
    auto& list = tensor.requires_grad() ? parameters.trained : parameters.frozen;
    list.push_back({item.key(), tensor, sparse.contains(tensor.unsafeGetTensorImpl())});
  }
  TORCH_CHECK_VALUE(!parameters.trained.empty(), "DistributedDataParallel(", sharding::type_name(module),
                    "): no parameter requires grad, so there is nothing to average; use the module itself");
  return parameters;
}

void check_same_on_all_ranks(const DdpParameters& parameters, const torch::nn::Module& module,
                             const DistributedDataParallelOptions& options) {
  const auto name = sharding::type_name(module);
  const auto different = difference_between_ranks(options.mesh, "DistributedDataParallel of " + name,
                                                  structure_of(parameters, module, options));
  TORCH_CHECK_VALUE(different.empty(), "DistributedDataParallel(", name,
                    "): the ranks hold different modules: ", different);
}

}  // namespace fsdp::parallel
