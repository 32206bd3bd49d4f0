#include "support/nets.h"

#include <ATen/CPUGeneratorImpl.h>
#include <fsdp/activation_checkpoint.h>

#include <cmath>

namespace fsdp::testing {

at::Generator seeded(uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

void fill_parameters(torch::nn::Module& module, uint64_t seed) {
  const torch::NoGradGuard no_grad;
  auto generator = seeded(seed);
  for (auto& parameter : module.parameters()) {
    auto noise = torch::empty_like(parameter).uniform_(-1, 1, generator);
    if (parameter.dim() > 1) {
      parameter.copy_(noise *
                      std::sqrt(3.0 * static_cast<double>(parameter.size(0)) / static_cast<double>(parameter.numel())));
    } else {
      const double centre = parameter.eq(1).all().item<bool>() ? 1.0 : 0.0;
      parameter.copy_(noise * 0.1 + centre);
    }
  }
}

Mlp::Mlp(int64_t in, int64_t hidden, int64_t middle, int64_t out) : in_(in) {
  layers = register_module("layers", torch::nn::Sequential(torch::nn::Linear(in, hidden), torch::nn::ReLU(),
                                                           torch::nn::Linear(hidden, middle), torch::nn::Tanh(),
                                                           torch::nn::Linear(middle, out)));
}

std::vector<torch::nn::Module*> Mlp::units() {
  return {layers->ptr(0).get(), layers->ptr(2).get(), layers->ptr(4).get(), this};
}

at::Tensor Mlp::batch(int64_t batch_size, at::Generator generator) const {
  return torch::empty({batch_size, in_}).normal_(0, 1, generator);
}

namespace {

class GptBlock : public torch::nn::Module {
 public:
  GptBlock(int64_t dim, int64_t heads) : heads_(heads) {
    using torch::nn::LinearOptions;
    norm1_ = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim})));
    qkv_ = register_module("qkv", torch::nn::Linear(LinearOptions(dim, 3 * dim).bias(false)));
    projection_ = register_module("projection", torch::nn::Linear(LinearOptions(dim, dim).bias(false)));
    norm2_ = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim})));
    up_ = register_module("up", torch::nn::Linear(LinearOptions(dim, 4 * dim).bias(false)));
    down_ = register_module("down", torch::nn::Linear(LinearOptions(4 * dim, dim).bias(false)));
  }

  at::Tensor forward(const at::Tensor& x) {
    auto h = x + attention(norm1_(x));
    return h + down_(torch::gelu(up_(norm2_(h))));
  }

 private:
  at::Tensor attention(const at::Tensor& x) {  // [B, T, d]
    auto qkv = qkv_(x).view({x.size(0), x.size(1), 3, heads_, -1}).permute({2, 0, 3, 1, 4});
    auto y = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, 0.0, /*is_causal=*/true);
    return projection_(y.transpose(1, 2).reshape(x.sizes()));
  }

  int64_t heads_;
  torch::nn::LayerNorm norm1_{nullptr}, norm2_{nullptr};
  torch::nn::Linear qkv_{nullptr}, projection_{nullptr}, up_{nullptr}, down_{nullptr};
};

}  // namespace

torch::nn::Linear tied_linear(const at::Tensor& weight) {
  struct TiedLinear : torch::nn::LinearImpl {
    explicit TiedLinear(const at::Tensor& shared)
        : LinearImpl(torch::nn::LinearOptions(shared.size(1), shared.size(0)).bias(false)) {
      parameters_.erase("weight");
      weight = register_parameter("weight", shared);
    }
  };
  return torch::nn::Linear(std::shared_ptr<torch::nn::LinearImpl>(std::make_shared<TiedLinear>(weight)));
}

Gpt::Gpt(int64_t num_layers, bool tied, int64_t vocab, int64_t dim, int64_t heads, int64_t length)
    : vocab_(vocab), length_(length) {
  token = register_module("token", torch::nn::Embedding(vocab, dim));
  position = register_module("position", torch::nn::Embedding(length, dim));
  blocks = register_module("blocks", torch::nn::ModuleList());
  for (int64_t i = 0; i < num_layers; ++i) {
    blocks->push_back(std::make_shared<GptBlock>(dim, heads));
  }
  norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim})));
  head = register_module(
      "head", tied ? tied_linear(token->weight) : torch::nn::Linear(torch::nn::LinearOptions(dim, vocab).bias(false)));
}

at::Tensor Gpt::forward(const at::Tensor& tokens) {
  auto h = token(tokens) + position(torch::arange(tokens.size(1)));
  for (const auto& module : *blocks) {
    const auto block = std::dynamic_pointer_cast<GptBlock>(module);
    h = checkpoint_blocks ? checkpoint(block, h) : block->forward(h);
  }
  return head(norm(h));
}

std::vector<torch::nn::Module*> Gpt::units() {
  std::vector<torch::nn::Module*> units;
  for (const auto& block : *blocks) {
    units.push_back(block.get());
  }
  units.push_back(this);
  return units;
}

at::Tensor Gpt::batch(int64_t batch_size, at::Generator generator) const {
  return torch::empty({batch_size, length_ + 1}, torch::kLong).random_(0, vocab_, generator);
}

at::Tensor Gpt::loss(const at::Tensor& tokens) {
  auto logits = forward(tokens.narrow(1, 0, length_));
  return torch::cross_entropy_loss(logits.reshape({-1, vocab_}), tokens.narrow(1, 1, length_).reshape({-1}));
}

Encoder::Encoder() {
  auto layer = torch::nn::TransformerEncoderLayer(
      torch::nn::TransformerEncoderLayerOptions(/*d_model=*/12, /*nhead=*/3).dim_feedforward(20).dropout(0.0));
  encoder = register_module("encoder", torch::nn::TransformerEncoder(torch::nn::TransformerEncoderOptions(layer, 2)));
  out = register_module("out", torch::nn::Linear(12, 5));
}

std::vector<torch::nn::Module*> Encoder::units() {
  std::vector<torch::nn::Module*> units;
  for (const auto& layer : *encoder->layers) {
    units.push_back(layer.get());
  }
  units.push_back(this);
  return units;
}

at::Tensor Encoder::batch(int64_t batch_size, at::Generator generator) const {
  return torch::empty({batch_size, 4, 12}).normal_(0, 1, generator);
}

Lstm::Lstm() {
  lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(6, 9).num_layers(2).batch_first(true)));
  out = register_module("out", torch::nn::Linear(9, 5));
}

at::Tensor Lstm::forward(const at::Tensor& x) { return out(std::get<0>(lstm->forward(x))); }

std::vector<torch::nn::Module*> Lstm::units() { return {lstm.get(), this}; }

at::Tensor Lstm::batch(int64_t batch_size, at::Generator generator) const {
  return torch::empty({batch_size, 5, 6}).normal_(0, 1, generator);
}

ConvNet::ConvNet() {
  using torch::nn::Conv2dOptions;
  first = register_module("first", torch::nn::Sequential(torch::nn::Conv2d(Conv2dOptions(3, 5, 3).bias(false)),
                                                         torch::nn::BatchNorm2d(5), torch::nn::ReLU()));
  second = register_module("second", torch::nn::Sequential(torch::nn::Conv2d(Conv2dOptions(5, 7, 3).bias(false)),
                                                           torch::nn::BatchNorm2d(7), torch::nn::ReLU()));
  out = register_module("out", torch::nn::Linear(7, 3));
}

at::Tensor ConvNet::forward(const at::Tensor& x) { return out(second->forward(first->forward(x)).mean({2, 3})); }

std::vector<torch::nn::Module*> ConvNet::units() { return {first.get(), second.get(), this}; }

at::Tensor ConvNet::batch(int64_t batch_size, at::Generator generator) const {
  return torch::empty({batch_size, 3, 7, 7}).normal_(0, 1, generator);
}

TanhLinear::TanhLinear(int64_t size) { linear = register_module("linear", torch::nn::Linear(size, size)); }

Block::Block() {
  first = register_module("first", torch::nn::Linear(16, 16));
  inner = register_module("inner", std::make_shared<TanhLinear>());
  second = register_module("second", torch::nn::Linear(16, 16));
}

at::Tensor Block::forward(const at::Tensor& x, const at::Tensor& scale) {
  auto h = inner->forward(first(x));
  return second(scale.defined() ? h * scale : h);
}

Blocks::Blocks(Kind kind, int64_t num_blocks) : kind_(kind) {
  in = register_module("in", torch::nn::Linear(8, 16));
  for (int64_t i = 0; i < num_blocks; ++i) {
    blocks.push_back(register_module("block" + std::to_string(i), std::make_shared<Block>()));
  }
  out = register_module("out", torch::nn::Linear(16, 3));
  if (kind == Kind::kRootInBlock) {
    scale = register_parameter("scale", torch::ones({16}));
  }
  if (kind == Kind::kSiblingGroup) {
    sibling = register_module("sibling", std::make_shared<TanhLinear>());
  }
}

at::Tensor Blocks::run_block(Block& block, const at::Tensor& x) {
  if (kind_ == Kind::kSiblingGroup) {
    return block.second(sibling->forward(block.first(x)));
  }
  return block.forward(x, scale);
}

at::Tensor Blocks::forward(const at::Tensor& x) {
  auto h = in(x);
  for (int round = 0; round < (kind_ == Kind::kAppliedTwice ? 2 : 1); ++round) {
    for (auto& block : blocks) {
      h = run_block(*block, h);
    }
  }
  return out(h);
}

std::vector<torch::nn::Module*> Blocks::units() {
  std::vector<torch::nn::Module*> units;
  for (auto& block : blocks) {
    if (kind_ == Kind::kNestedInner) {
      units.push_back(block->inner.get());
    }
    units.push_back(block.get());
  }
  if (sibling) {
    units.push_back(sibling.get());
  }
  units.push_back(this);
  return units;
}

at::Tensor Blocks::batch(int64_t batch_size, at::Generator generator) const {
  return torch::empty({batch_size, 8}).normal_(0, 1, generator);
}

}  // namespace fsdp::testing
