#include <fsdp/materialize.h>
#include <fsdp/module_wrapper.h>
#include <torch/nn/init.h>
#include <torch/nn/modules.h>

namespace fsdp {

namespace {

template <class Impl>
bool reset_if(torch::nn::Module& module) {
  auto* known = module.as<Impl>();
  if (known) known->reset_parameters();
  return known != nullptr;
}

template <class... Impls>
void reset_first_of(torch::nn::Module& module) {
  (void)(reset_if<Impls>(module) || ...);
}

}  // namespace

void reset_parameters(torch::nn::Module& module) {
  using namespace torch::nn;  // NOLINT(google-build-using-namespace): a list of its classes
  module.apply([](Module& given) {
    auto& part = unwrapped(given);
    reset_first_of<LinearImpl, BilinearImpl, EmbeddingImpl, EmbeddingBagImpl, LayerNormImpl, GroupNormImpl,
                   BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl, InstanceNorm1dImpl, InstanceNorm2dImpl,
                   InstanceNorm3dImpl, Conv1dImpl, Conv2dImpl, Conv3dImpl, ConvTranspose1dImpl, ConvTranspose2dImpl,
                   ConvTranspose3dImpl, RNNImpl, LSTMImpl, GRUImpl, RNNCellImpl, LSTMCellImpl, GRUCellImpl>(part);
    if (auto* attention = part.as<MultiheadAttentionImpl>()) attention->_reset_parameters();
    if (auto* prelu = part.as<PReLUImpl>()) init::constant_(prelu->weight, prelu->options.init());
  });
}

}  // namespace fsdp
