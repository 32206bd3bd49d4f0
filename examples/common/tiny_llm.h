#pragma once
// A stack of Transformer blocks with causal attention, of plain torch::nn modules. It knows nothing of sharding.
#include <torch/torch.h>

namespace lesson {

struct TinyLLMOptions {
  int64_t depth = 2, dim = 64, heads = 4, vocab_size = 128;
};

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const TinyLLMOptions& options) : heads(options.heads) {
    const auto dim = options.dim;
    ln1 = register_module("ln1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim})));
    ln2 = register_module("ln2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim})));
    qkv = register_module("qkv", torch::nn::Linear(dim, 3 * dim));
    out = register_module("out", torch::nn::Linear(dim, dim));
    mlp = register_module("mlp", torch::nn::Sequential(torch::nn::Linear(dim, 4 * dim), torch::nn::GELU(),
                                                       torch::nn::Linear(4 * dim, dim)));
  }
  at::Tensor forward(at::Tensor x) {  // [B, S, D]
    const auto parts = qkv(ln1(x)).view({x.size(0), x.size(1), 3, heads, -1}).permute({2, 0, 3, 1, 4});
    const auto y = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    x = x + out(y.transpose(1, 2).reshape_as(x));
    return x + mlp->forward(ln2(x));
  }
  int64_t heads;
  torch::nn::LayerNorm ln1{nullptr}, ln2{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr};
  torch::nn::Sequential mlp{nullptr};
};
TORCH_MODULE(Block);

struct TinyLLMImpl : torch::nn::Module {
  explicit TinyLLMImpl(const TinyLLMOptions& options) {
    register_module("layers", layers);
    for (int64_t i = 0; i < options.depth; ++i) layers->push_back(Block(options));
    head = register_module("head", torch::nn::Linear(options.dim, options.vocab_size));
  }
  at::Tensor forward(at::Tensor x) {  // [B, S, D] -> [B, S, V]
    for (const auto& layer : *layers) x = layer->as<Block>()->forward(x);
    return head(x);
  }
  torch::nn::ModuleList layers;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(TinyLLM);

}  // namespace lesson
