#pragma once
// Small nets that tests train twice: plain on the joined batch, and sharded on one rank's part of it.
//
// None of them knows of sharding. Values come from a private generator, so that ranks may be threads of one process.
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <vector>

namespace fsdp::testing {

class TestNet : public torch::nn::Module {
 public:
  virtual at::Tensor forward(const at::Tensor& x) = 0;
  // What fully_shard wraps, bottom up, the root last.
  virtual std::vector<torch::nn::Module*> units() = 0;
  // A batch of `batch_size` rows, floating inputs as float.
  [[nodiscard]] virtual at::Tensor batch(int64_t batch_size, at::Generator generator) const = 0;
  // A mean over the batch, so that the mean over ranks is the loss of the joined batch.
  virtual at::Tensor loss(const at::Tensor& x) { return forward(x).square().mean(); }
};

using NetFactory = std::function<std::shared_ptr<TestNet>()>;

[[nodiscard]] at::Generator seeded(uint64_t seed);
// Overwrites every parameter by values that depend on `seed` and its place only; norms stay near one.
void fill_parameters(torch::nn::Module& module, uint64_t seed);

template <class Net, class... Args>
NetFactory net_of(Args... args) {
  return [=]() -> std::shared_ptr<TestNet> {
    auto net = std::make_shared<Net>(args...);
    fill_parameters(*net, 5);
    return net;
  };
}

// Linear - ReLU - Linear - Tanh - Linear. With the default sizes every rank count from 2 to 4 cuts unevenly, and at 4
// the last rank holds empty shards. Parameters: weight, bias of layers->at(0), (2), (4).
class Mlp : public TestNet {
 public:
  explicit Mlp(int64_t in = 7, int64_t hidden = 13, int64_t middle = 5, int64_t out = 3);
  at::Tensor forward(const at::Tensor& x) override { return layers->forward(x); }
  std::vector<torch::nn::Module*> units() override;
  at::Tensor batch(int64_t batch_size, at::Generator generator) const override;

  torch::nn::Sequential layers{nullptr};

 private:
  int64_t in_;
};

// All layers but the last take and give 16 columns.
[[nodiscard]] inline NetFactory square_mlp() { return net_of<Mlp>(8, 16, 16, 3); }

// A Linear without bias whose weight is another module's.
[[nodiscard]] torch::nn::Linear tied_linear(const at::Tensor& weight);

// Token and position embeddings, pre-norm blocks (attention and projections without bias), norm, head.
class Gpt : public TestNet {
 public:
  explicit Gpt(int64_t num_layers = 2, bool tied = false, int64_t vocab = 11, int64_t dim = 12, int64_t heads = 3,
               int64_t length = 6);
  at::Tensor forward(const at::Tensor& tokens) override;  // [B, T] -> logits [B, T, vocab]
  std::vector<torch::nn::Module*> units() override;
  at::Tensor batch(int64_t batch_size, at::Generator generator) const override;  // tokens [B, length + 1]
  at::Tensor loss(const at::Tensor& tokens) override;                            // of the next token

  torch::nn::Embedding token{nullptr}, position{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
  bool checkpoint_blocks = false;  // each runs again in backward

 private:
  int64_t vocab_, length_;
};

// torch::nn::TransformerEncoder, each layer a unit.
class Encoder : public TestNet {
 public:
  Encoder();
  at::Tensor forward(const at::Tensor& x) override { return out(encoder->forward(x)); }
  std::vector<torch::nn::Module*> units() override;
  at::Tensor batch(int64_t batch_size, at::Generator generator) const override;  // [T, B, d]
  at::Tensor loss(const at::Tensor& x) override { return forward(x.transpose(0, 1)).square().mean(); }

  torch::nn::TransformerEncoder encoder{nullptr};
  torch::nn::Linear out{nullptr};
};

class Lstm : public TestNet {
 public:
  Lstm();
  at::Tensor forward(const at::Tensor& x) override;  // [B, T, d]
  std::vector<torch::nn::Module*> units() override;
  at::Tensor batch(int64_t batch_size, at::Generator generator) const override;

  torch::nn::LSTM lstm{nullptr};
  torch::nn::Linear out{nullptr};
};

// Two convolutions (without bias), each before a BatchNorm.
class ConvNet : public TestNet {
 public:
  ConvNet();
  at::Tensor forward(const at::Tensor& x) override;
  std::vector<torch::nn::Module*> units() override;
  at::Tensor batch(int64_t batch_size, at::Generator generator) const override;

  torch::nn::Sequential first{nullptr}, second{nullptr};
  torch::nn::Linear out{nullptr};
};

// Linear - tanh.
class TanhLinear : public torch::nn::Module {
 public:
  explicit TanhLinear(int64_t size = 16);
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(linear(x)); }

  torch::nn::Linear linear{nullptr};
};

// first linear - inner - second linear; the inner module sits in the middle of the block's work.
class Block : public torch::nn::Module {
 public:
  Block();
  at::Tensor forward(const at::Tensor& x, const at::Tensor& scale = {});

  torch::nn::Linear first{nullptr}, second{nullptr};
  std::shared_ptr<TanhLinear> inner;
};

// Four blocks under a root with parameters of its own, in the ways a module tree can be cut into groups.
class Blocks : public TestNet {
 public:
  enum class Kind {
    kPlain,         // each block a group
    kNestedInner,   // each block's inner module a group of its own
    kRootInBlock,   // a parameter of the root is used inside each block
    kSiblingGroup,  // one group of its own is used in the middle of each block
    kAppliedTwice,  // the blocks run twice
  };
  explicit Blocks(Kind kind = Kind::kPlain, int64_t num_blocks = 4);
  at::Tensor forward(const at::Tensor& x) override;
  std::vector<torch::nn::Module*> units() override;
  at::Tensor batch(int64_t batch_size, at::Generator generator) const override;

  torch::nn::Linear in{nullptr}, out{nullptr};
  at::Tensor scale;
  std::vector<std::shared_ptr<Block>> blocks;
  std::shared_ptr<TanhLinear> sibling;

 private:
  at::Tensor run_block(Block& block, const at::Tensor& x);
  Kind kind_;
};

}  // namespace fsdp::testing
