#include "attention/sequence_net.h"

#include <fsdp/activation_checkpoint.h>

namespace fsdp::testing {

SequenceNet::SequenceNet(int64_t max_length, int64_t num_blocks) {
  token = register_module("token", torch::nn::Embedding(kVocab, kDim));
  position = register_module("position", torch::nn::Embedding(max_length, kDim));
  qkv = register_module("qkv", torch::nn::ModuleList());
  projection = register_module("projection", torch::nn::ModuleList());
  for (int64_t i = 0; i < num_blocks; ++i) {
    qkv->push_back(torch::nn::Linear(kDim, 3 * kDim));
    projection->push_back(torch::nn::Linear(kDim, kDim));
  }
  head = register_module("head", torch::nn::Linear(kDim, kVocab));
}

at::Tensor SequenceNet::forward(const at::Tensor& tokens, const at::Tensor& positions) {
  auto x = token(tokens) + position(positions);  // [B, S, D]
  for (size_t i = 0; i < qkv->size(); ++i) {
    const auto attend = [this, i](const at::Tensor& h) {
      const auto heads = qkv->at<torch::nn::LinearImpl>(i).forward(h);
      const auto parts = heads.view({h.size(0), h.size(1), 3, kHeads, kDim / kHeads}).permute({2, 0, 3, 1, 4});
      const auto y = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, is_causal);
      return projection->at<torch::nn::LinearImpl>(i).forward(y.transpose(1, 2).reshape_as(h));
    };
    x = x + (checkpoints ? fsdp::checkpoint(attend, x) : attend(x));
  }
  return head(x);
}

std::shared_ptr<SequenceNet> make_sequence_net() {
  auto net = std::make_shared<SequenceNet>();
  fill_parameters(*net, 5);
  return net;
}

at::Tensor loss_sum(const at::Tensor& logits, const at::Tensor& labels) {
  namespace F = torch::nn::functional;
  return F::cross_entropy(logits.flatten(0, 1), labels.flatten(),
                          F::CrossEntropyFuncOptions().ignore_index(-100).reduction(torch::kSum));
}

int64_t num_valid(const at::Tensor& labels) { return labels.ne(-100).sum().item<int64_t>(); }

}  // namespace fsdp::testing
