#include "train/evaluate.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/functional/loss.h>

#include <algorithm>

namespace fsdp::train {
namespace {

// Evaluation mode and no gradients while it lives.
class EvaluationScope {
 public:
  explicit EvaluationScope(torch::nn::Module& module) : module_(module), was_training_(module.is_training()) {
    module_.eval();
  }
  ~EvaluationScope() { module_.train(was_training_); }
  EvaluationScope(const EvaluationScope&) = delete;
  EvaluationScope& operator=(const EvaluationScope&) = delete;

 private:
  torch::nn::Module& module_;
  bool was_training_;
  torch::NoGradGuard no_grad_;
};

// Bytes in the well-formed UTF-8 sequence at `text[i]` that is worth showing, or 0.
size_t utf8_length(const std::string& text, size_t i) {
  const auto byte = [&](size_t k) { return static_cast<unsigned char>(k < text.size() ? text[k] : 0); };
  const auto lead = byte(i);
  const size_t length = lead >= 0xc2 && lead < 0xe0   ? 2
                        : lead >= 0xe0 && lead < 0xf0 ? 3
                        : lead >= 0xf0 && lead < 0xf5 ? 4
                                                      : 0;
  for (size_t k = 1; k < length; ++k) {
    if ((byte(i + k) & 0xc0) != 0x80) {
      return 0;
    }
  }
  const auto second = byte(i + 1);
  const bool is_terminal_control = lead == 0xc2 && second < 0xa0;
  const bool is_overlong = (lead == 0xe0 && second < 0xa0) || (lead == 0xf0 && second < 0x90);
  const bool is_surrogate_or_beyond = (lead == 0xed && second >= 0xa0) || (lead == 0xf4 && second >= 0x90);
  return is_terminal_control || is_overlong || is_surrogate_or_beyond ? 0 : length;
}

}  // namespace

double validation_loss(GPT& model, const FixedWindows& windows, const World& world, int64_t rows_per_rank) {
  const EvaluationScope scope(*model);
  double total = 0.0;
  // Each forward of a sharded model is collective: all ranks run as many, the last ones perhaps over repeated windows.
  for (int64_t first = 0; first < windows.size(); first += rows_per_rank * world.num_data_ranks()) {
    const auto mine = first + world.data_rank() * rows_per_rank;
    const auto batch = windows.rows(mine, rows_per_rank);
    const auto split = world.split_sequences(*model, batch);
    const auto logits = model(batch.inputs, split ? split->position_ids() : at::Tensor());
    const auto losses = torch::nn::functional::cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(),
        torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kNone));  // [B * T]
    const auto num_own = std::clamp<int64_t>(windows.size() - mine, 0, rows_per_rank);
    total += losses.view_as(batch.targets).narrow(0, 0, num_own).sum(at::kDouble).item<double>();
  }
  const auto num_bytes = static_cast<double>(windows.size() * windows.seq_len());
  return world.sum({total}).front() / num_bytes;
}

void SampleOptions::validate() const {
  TORCH_CHECK_VALUE(num_bytes >= 0, "sample_bytes must not be negative, but is ", num_bytes);
  TORCH_CHECK_VALUE(temperature >= 0.0, "temperature must not be negative, but is ", temperature);
  TORCH_CHECK_VALUE(!prompt.empty(), "the prompt must have at least one byte");
}

std::string sample_text(GPT& model, const SampleOptions& options) {
  options.validate();
  const EvaluationScope scope(*model);
  // A generator of its own, seeded alike on all ranks: the global one has moved on differently on each.
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
  auto text = options.prompt;
  for (int64_t i = 0; i < options.num_bytes; ++i) {
    const auto num_context = std::min<int64_t>(static_cast<int64_t>(text.size()), model->options().seq_len);
    auto tokens = at::empty({1, num_context}, at::kLong);
    std::transform(text.end() - num_context, text.end(), tokens.mutable_data_ptr<int64_t>(),
                   [](char c) { return static_cast<unsigned char>(c); });
    const auto logits = model(tokens)[0][-1];  // [V]
    const auto next = options.temperature == 0.0
                          ? logits.argmax()
                          : at::multinomial(at::softmax(logits / options.temperature, 0), 1, false, generator);
    text.push_back(static_cast<char>(next.item<int64_t>()));
  }
  return text.substr(options.prompt.size());
}

std::string printable(const std::string& bytes) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string result;
  for (size_t i = 0; i < bytes.size();) {
    const auto byte = static_cast<unsigned char>(bytes[i]);
    const size_t length = byte == '\n' || byte == '\t' || (byte >= ' ' && byte < 0x7f) ? 1 : utf8_length(bytes, i);
    if (length > 0) {
      result.append(bytes, i, length);
      i += length;
      continue;
    }
    result.append({'\\', 'x', kHex[byte >> 4], kHex[byte & 15]});
    ++i;
  }
  return result;
}

}  // namespace fsdp::train
