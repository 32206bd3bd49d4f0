#pragma once
// The model that `fsdp train` trains: a GPT of plain torch::nn modules that know nothing of sharding.
//
//   GPT model(GPTOptions{.seq_len = 128, .dim = 128, .num_heads = 4, .num_layers = 4});
//   auto logits = model(tokens);   // int64 [B, T] -> float [B, T, vocab_size]
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

namespace fsdp::train {

struct GPTOptions {
  int64_t vocab_size = 256;
  int64_t seq_len = 128;  // longest input
  int64_t dim = 128;
  int64_t num_heads = 4;
  int64_t num_layers = 4;
  double dropout = 0.0;
  bool activation_checkpoint = false;  // keep each block's input only and run the block again in backward

  // Errors: c10::ValueError naming the size that is impossible.
  void validate() const;
};

// Causal self-attention through at::scaled_dot_product_attention; projections without bias.
class AttentionImpl : public torch::nn::Module {
 public:
  explicit AttentionImpl(const GPTOptions& options);
  at::Tensor forward(const at::Tensor& x);  // [B, T, D] -> [B, T, D]

 private:
  int64_t num_heads_;
  double dropout_;
  torch::nn::Linear qkv_{nullptr}, proj_{nullptr};
};
TORCH_MODULE(Attention);

// up - gelu - down, without bias.
class FeedForwardImpl : public torch::nn::Module {
 public:
  explicit FeedForwardImpl(const GPTOptions& options);
  at::Tensor forward(const at::Tensor& x);  // [B, T, D] -> [B, T, D]

 private:
  torch::nn::Linear up_{nullptr}, down_{nullptr};
};
TORCH_MODULE(FeedForward);

// Pre-norm: x + attention(norm(x)), then x + feed_forward(norm(x)).
class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const GPTOptions& options);
  at::Tensor forward(const at::Tensor& x);  // [B, T, D] -> [B, T, D]

 private:
  torch::nn::LayerNorm attention_norm_{nullptr}, feed_forward_norm_{nullptr};
  Attention attention_{nullptr};
  FeedForward feed_forward_{nullptr};
  torch::nn::Dropout dropout_{nullptr};
};
TORCH_MODULE(Block);

class GPTImpl : public torch::nn::Module {
 public:
  // Errors: c10::ValueError for impossible sizes.
  explicit GPTImpl(const GPTOptions& options);

  // tokens: int64 [B, T], T <= seq_len; positions: int64 [T], the place of each in its sequence, 0 .. T-1 when
  // undefined. Returns logits [B, T, V]. Errors: c10::ValueError for a longer input.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& positions = {});

  [[nodiscard]] const GPTOptions& options() const { return options_; }
  torch::nn::ModuleList blocks{nullptr};  // the unit of sharding

 private:
  void reset_parameters();

  GPTOptions options_;
  torch::nn::Embedding token_embedding_{nullptr}, position_embedding_{nullptr};
  torch::nn::Dropout dropout_{nullptr};
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear head_{nullptr};
};
TORCH_MODULE(GPT);

}  // namespace fsdp::train
