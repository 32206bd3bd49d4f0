#pragma once
// A small causal language model that is told which position each token has, for sequences that are split.
#include <torch/torch.h>

#include "support/nets.h"

namespace fsdp::testing {

class SequenceNet : public torch::nn::Module {
 public:
  static constexpr int64_t kVocab = 11, kDim = 16, kHeads = 4;

  explicit SequenceNet(int64_t max_length = 32, int64_t num_blocks = 2);
  // tokens int64 [B, S], positions int64 [S] -> logits [B, S, kVocab]
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& positions);

  torch::nn::Embedding token{nullptr}, position{nullptr};
  torch::nn::ModuleList qkv{nullptr}, projection{nullptr};
  torch::nn::Linear head{nullptr};
  bool is_causal = true;
  bool checkpoints = false;  // runs each attention again in backward
};

[[nodiscard]] std::shared_ptr<SequenceNet> make_sequence_net();
// The sum of the losses of the labels that count.
[[nodiscard]] at::Tensor loss_sum(const at::Tensor& logits, const at::Tensor& labels);
[[nodiscard]] int64_t num_valid(const at::Tensor& labels);

}  // namespace fsdp::testing
