#pragma once
// The model of the lessons: a small Transformer of plain torch::nn modules. It knows nothing of sharding.
#include <torch/torch.h>

namespace lesson {

struct ModelArgs {
  int64_t num_layers = 2;
  int64_t vocab_size = 8;
  int64_t max_seq_len = 16;
  int64_t dim = 16;
  int64_t num_heads = 4;
  double dropout = 0.1;
};

inline torch::nn::Linear linear_without_bias(int64_t in_features, int64_t out_features) {
  return torch::nn::Linear(torch::nn::LinearOptions(in_features, out_features).bias(false));
}

struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(const ModelArgs& args) : num_heads(args.num_heads), dropout(args.dropout) {
    wq = register_module("wq", linear_without_bias(args.dim, args.dim));
    wk = register_module("wk", linear_without_bias(args.dim, args.dim));
    wv = register_module("wv", linear_without_bias(args.dim, args.dim));
    wo = register_module("wo", linear_without_bias(args.dim, args.dim));
  }
  at::Tensor forward(const at::Tensor& x) {  // [B, T, D]
    const auto B = x.size(0), T = x.size(1), D = x.size(2);
    const auto heads = [&](const at::Tensor& y) { return y.view({B, T, num_heads, D / num_heads}).transpose(1, 2); };
    const auto y =
        at::scaled_dot_product_attention(heads(wq(x)), heads(wk(x)), heads(wv(x)), {}, is_training() ? dropout : 0.0);
    return wo(y.transpose(1, 2).reshape({B, T, D}));
  }
  int64_t num_heads;
  double dropout;
  torch::nn::Linear wq{nullptr}, wk{nullptr}, wv{nullptr}, wo{nullptr};
};
TORCH_MODULE(Attention);

struct FeedForwardImpl : torch::nn::Module {
  explicit FeedForwardImpl(const ModelArgs& args) {
    w1 = register_module("w1", torch::nn::Linear(args.dim, 4 * args.dim));
    w2 = register_module("w2", torch::nn::Linear(4 * args.dim, args.dim));
    dropout = register_module("dropout", torch::nn::Dropout(args.dropout));
  }
  at::Tensor forward(const at::Tensor& x) { return dropout(w2(at::gelu(w1(x)))); }
  torch::nn::Linear w1{nullptr}, w2{nullptr};
  torch::nn::Dropout dropout{nullptr};
};
TORCH_MODULE(FeedForward);

struct TransformerBlockImpl : torch::nn::Module {
  explicit TransformerBlockImpl(const ModelArgs& args) {
    attention_norm = register_module("attention_norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({args.dim})));
    attention = register_module("attention", Attention(args));
    ffn_norm = register_module("ffn_norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({args.dim})));
    feed_forward = register_module("feed_forward", FeedForward(args));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto h = x + attention(attention_norm(x));
    return h + feed_forward(ffn_norm(h));
  }
  torch::nn::LayerNorm attention_norm{nullptr}, ffn_norm{nullptr};
  Attention attention{nullptr};
  FeedForward feed_forward{nullptr};
};
TORCH_MODULE(TransformerBlock);

struct TransformerImpl : torch::nn::Module {
  explicit TransformerImpl(const ModelArgs& args) {
    tok_embeddings = register_module("tok_embeddings", torch::nn::Embedding(args.vocab_size, args.dim));
    pos_embeddings = register_module("pos_embeddings", torch::nn::Embedding(args.max_seq_len, args.dim));
    dropout = register_module("dropout", torch::nn::Dropout(args.dropout));
    layers = register_module("layers", torch::nn::ModuleList());
    for (int64_t i = 0; i < args.num_layers; ++i) layers->push_back(TransformerBlock(args));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({args.dim})));
    output = register_module("output", linear_without_bias(args.dim, args.vocab_size));
  }
  at::Tensor forward(const at::Tensor& tokens) {  // int64 [B, T] -> float [B, T, V]
    auto h = dropout(tok_embeddings(tokens) + pos_embeddings(at::arange(tokens.size(1), tokens.options())));
    for (const auto& layer : *layers) h = layer->as<TransformerBlock>()->forward(h);
    return output(norm(h)).to(torch::kFloat);
  }
  torch::nn::Embedding tok_embeddings{nullptr}, pos_embeddings{nullptr};
  torch::nn::Dropout dropout{nullptr};
  torch::nn::ModuleList layers{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear output{nullptr};
};
TORCH_MODULE(Transformer);

}  // namespace lesson
