#include "train/evaluate.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "support/errors.h"
#include "support/run_ranks.h"

namespace fsdp::train {
namespace {

GPT small_evaluated_gpt() {
  torch::manual_seed(3);
  return GPT(GPTOptions{.seq_len = 8, .dim = 16, .num_heads = 2, .num_layers = 1, .dropout = 0.2});
}

TEST(ValidationLoss, IsTheMeanOverAllWindows) {
  auto model = small_evaluated_gpt();
  const FixedWindows windows(torch::randint(256, {100}, at::kByte), 8, 7);
  const auto loss = validation_loss(model, windows, World::alone(), 3);
  EXPECT_TRUE(model->is_training()) << "the mode must come back";
  model->eval();
  const auto all = windows.rows(0, 7);
  const auto expected = torch::nn::functional::cross_entropy(model(all.inputs).flatten(0, 1), all.targets.flatten());
  EXPECT_NEAR(loss, expected.item<double>(), 1e-6);
}

TEST(ValidationLoss, IsTheSameAtEveryWorldSize) {
  auto model = small_evaluated_gpt();
  const FixedWindows windows(torch::randint(256, {100}, at::kByte), 8, 7);  // 7 windows: uneven on 2 and 3 ranks
  const auto expected = validation_loss(model, windows, World::alone(), 7);
  for (const int world_size : {1, 2, 3}) {
    std::vector<GPT> models;  // made here: ranks as threads share the generator of initial weights
    for (int rank = 0; rank < world_size; ++rank) {
      models.push_back(small_evaluated_gpt());
    }
    testing::run_ranks(world_size, [&](const ProcessGroup& group, int rank) {
      const auto world = World::over(DeviceMesh::from_group(group, at::kCPU));
      const auto loss = validation_loss(models[static_cast<size_t>(rank)], windows, world, 2);
      EXPECT_NEAR(loss, expected, 1e-6) << world_size << " ranks";
    });
  }
}

TEST(SampleText, DependsOnTheSeedAlone) {
  auto model = small_evaluated_gpt();
  const SampleOptions options{.prompt = "ab", .num_bytes = 20, .temperature = 1.0, .seed = 5};
  const auto text = sample_text(model, options);
  EXPECT_EQ(text.size(), 20U);  // longer than seq_len: the context slides
  (void)torch::rand({3});
  EXPECT_EQ(sample_text(model, options), text);
  auto other = options;
  other.seed = 6;
  EXPECT_NE(sample_text(model, other), text);
}

TEST(SampleText, IsGreedyAtTemperatureZero) {
  auto model = small_evaluated_gpt();
  SampleOptions options{.prompt = "ab", .num_bytes = 5, .temperature = 0.0, .seed = 5};
  const auto text = sample_text(model, options);
  options.seed = 6;
  EXPECT_EQ(sample_text(model, options), text);
}

TEST(SampleText, NamesImpossibleValues) {
  auto model = small_evaluated_gpt();
  EXPECT_ERROR((void)sample_text(model, {.prompt = ""}), c10::ValueError, "prompt must have at least one byte");
  EXPECT_ERROR((void)sample_text(model, {.num_bytes = -1}), c10::ValueError, "sample_bytes must not be negative");
  EXPECT_ERROR((void)sample_text(model, {.temperature = -0.5}), c10::ValueError, "temperature must not be negative");
}

TEST(Printable, EscapesWhatATerminalWouldObey) {
  EXPECT_EQ(printable("plain text\n\ttab"), "plain text\n\ttab");
  EXPECT_EQ(printable("\x1b[2J\r\x07\x7f"), "\\x1b[2J\\x0d\\x07\\x7f");
  EXPECT_EQ(printable("\xc3\xa4 \xe2\x82\xac \xf0\x9f\x98\x80"), "\xc3\xa4 \xe2\x82\xac \xf0\x9f\x98\x80");
  EXPECT_EQ(printable("\xc3"), "\\xc3");
  EXPECT_EQ(printable("\xc2\x9b"), "\\xc2\\x9b");           // a control character in two bytes
  EXPECT_EQ(printable("\xe0\x80\xaf"), "\\xe0\\x80\\xaf");  // overlong
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");  // a surrogate
}

}  // namespace
}  // namespace fsdp::train
