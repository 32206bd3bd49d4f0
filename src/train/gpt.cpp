#include "train/gpt.h"

#include <fsdp/activation_checkpoint.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/init.h>

#include <cmath>

#include "train/option_checks.h"

namespace fsdp::train {
namespace {

torch::nn::Linear linear_without_bias(int64_t in_features, int64_t out_features) {
  return torch::nn::Linear(torch::nn::LinearOptions(in_features, out_features).bias(false));
}

torch::nn::LayerNorm layer_norm(int64_t dim) { return torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim})); }

}  // namespace

void GPTOptions::validate() const {
  check_at_least("vocab_size", vocab_size, 1);
  check_at_least("seq_len", seq_len, 1);
  check_at_least("dim", dim, 1);
  check_at_least("num_heads", num_heads, 1);
  check_at_least("num_layers", num_layers, 1);
  TORCH_CHECK_VALUE(dim % num_heads == 0, "dim must be a multiple of num_heads, but ", dim, " is not a multiple of ",
                    num_heads, ". Hint: dim ", (dim / num_heads + 1) * num_heads, " is.");
  TORCH_CHECK_VALUE(dropout >= 0.0 && dropout < 1.0, "dropout must lie in [0, 1), but is ", dropout);
}

AttentionImpl::AttentionImpl(const GPTOptions& options) : num_heads_(options.num_heads), dropout_(options.dropout) {
  qkv_ = register_module("qkv", linear_without_bias(options.dim, 3 * options.dim));
  proj_ = register_module("proj", linear_without_bias(options.dim, options.dim));
}

at::Tensor AttentionImpl::forward(const at::Tensor& x) {
  const auto B = x.size(0), T = x.size(1), D = x.size(2);
  // [B, T, 3D] -> 3 x [B, H, T, D / H]
  const auto qkv = qkv_(x).view({B, T, 3, num_heads_, D / num_heads_}).permute({2, 0, 3, 1, 4});
  const auto heads = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], /*attn_mask=*/{},
                                                      is_training() ? dropout_ : 0.0, /*is_causal=*/true);
  return proj_(heads.transpose(1, 2).reshape({B, T, D}));
}

FeedForwardImpl::FeedForwardImpl(const GPTOptions& options) {
  up_ = register_module("up", linear_without_bias(options.dim, 4 * options.dim));
  down_ = register_module("down", linear_without_bias(4 * options.dim, options.dim));
}

at::Tensor FeedForwardImpl::forward(const at::Tensor& x) { return down_(at::gelu(up_(x), "tanh")); }

BlockImpl::BlockImpl(const GPTOptions& options) {
  attention_norm_ = register_module("attention_norm", layer_norm(options.dim));
  attention_ = register_module("attention", Attention(options));
  feed_forward_norm_ = register_module("feed_forward_norm", layer_norm(options.dim));
  feed_forward_ = register_module("feed_forward", FeedForward(options));
  dropout_ = register_module("dropout", torch::nn::Dropout(options.dropout));
}

at::Tensor BlockImpl::forward(const at::Tensor& x) {
  const auto h = x + dropout_(attention_(attention_norm_(x)));
  return h + dropout_(feed_forward_(feed_forward_norm_(h)));
}

GPTImpl::GPTImpl(const GPTOptions& options) : options_(options) {
  options.validate();
  token_embedding_ = register_module("token_embedding", torch::nn::Embedding(options.vocab_size, options.dim));
  position_embedding_ = register_module("position_embedding", torch::nn::Embedding(options.seq_len, options.dim));
  dropout_ = register_module("dropout", torch::nn::Dropout(options.dropout));
  blocks = register_module("blocks", torch::nn::ModuleList());
  for (int64_t i = 0; i < options.num_layers; ++i) {
    blocks->push_back(Block(options));
  }
  norm_ = register_module("norm", layer_norm(options.dim));
  head_ = register_module("head", linear_without_bias(options.dim, options.vocab_size));
  reset_parameters();
}

void GPTImpl::reset_parameters() {
  const torch::NoGradGuard no_grad;
  // Each block adds twice to the residual stream: scaling those two projections keeps its variance independent of
  // depth.
  const double residual_std = 0.02 / std::sqrt(2.0 * static_cast<double>(options_.num_layers));
  for (auto& item : named_parameters()) {
    auto& parameter = item.value();
    if (parameter.dim() < 2) {
      continue;  // norms start as the identity already
    }
    const auto& name = item.key();
    const bool adds_to_residual = name.ends_with("proj.weight") || name.ends_with("down.weight");
    torch::nn::init::normal_(parameter, 0.0, adds_to_residual ? residual_std : 0.02);
  }
}

at::Tensor GPTImpl::forward(const at::Tensor& tokens, const at::Tensor& positions) {
  const auto T = tokens.size(1);
  TORCH_CHECK_VALUE(T <= options_.seq_len, "the input has ", T, " tokens, but the model was made for seq_len ",
                    options_.seq_len);
  const auto places = positions.defined() ? positions : at::arange(T, tokens.options());
  auto x = token_embedding_(tokens) + position_embedding_(places);  // [B, T, D]
  x = dropout_(x);
  for (size_t i = 0; i < blocks->size(); ++i) {
    const auto block = blocks->ptr<BlockImpl>(i);
    x = options_.activation_checkpoint ? checkpoint(block, x) : block->forward(x);
  }
  return head_(norm_(x));  // [B, T, V]
}

}  // namespace fsdp::train
