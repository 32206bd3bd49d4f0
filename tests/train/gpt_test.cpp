#include "train/gpt.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "support/errors.h"

namespace fsdp::train {
namespace {

GPTOptions small_gpt_options() {
  return {.vocab_size = 256, .seq_len = 12, .dim = 16, .num_heads = 4, .num_layers = 2, .dropout = 0.0};
}

TEST(GPT, MapsTokensToLogits) {
  GPT model(small_gpt_options());
  const auto logits = model(torch::randint(256, {3, 12}));
  EXPECT_EQ(logits.sizes(), (std::vector<int64_t>{3, 12, 256}));
  EXPECT_EQ(model(torch::randint(256, {1, 5})).sizes(), (std::vector<int64_t>{1, 5, 256}));
  EXPECT_ERROR((void)model(torch::randint(256, {1, 13})), c10::ValueError,
               "the input has 13 tokens, but the model was made for seq_len 12");
}

TEST(GPT, HasTheParametersOfItsSizes) {
  GPT model(small_gpt_options());
  int64_t num_parameters = 0;
  for (const auto& parameter : model->parameters()) {
    num_parameters += parameter.numel();
  }
  const int64_t D = 16, per_block = 12 * D * D + 4 * D;  // qkv, proj, up, down without bias; two norms
  EXPECT_EQ(num_parameters, 256 * D + 12 * D + 2 * per_block + 2 * D + 256 * D);
  EXPECT_TRUE(model->named_parameters().contains("blocks.1.attention.qkv.weight"));
  EXPECT_FALSE(model->named_parameters().contains("blocks.1.attention.qkv.bias"));
}

TEST(GPT, SeesNoLaterToken) {
  torch::manual_seed(0);
  GPT model(small_gpt_options());
  const auto tokens = torch::randint(256, {1, 12});
  auto changed = tokens.clone();
  changed[0][7] = (tokens[0][7].item<int64_t>() + 1) % 256;
  const auto before = model(tokens), after = model(changed);
  EXPECT_TRUE(at::allclose(before.narrow(1, 0, 7), after.narrow(1, 0, 7)));
  EXPECT_FALSE(at::allclose(before.narrow(1, 7, 5), after.narrow(1, 7, 5)));
}

TEST(GPT, StartsNearTheUniformDistribution) {
  torch::manual_seed(0);
  GPT model(small_gpt_options());
  const auto tokens = torch::randint(256, {8, 12});
  const auto loss = torch::nn::functional::cross_entropy(model(tokens).flatten(0, 1), tokens.flatten());
  EXPECT_NEAR(loss.item<double>(), std::log(256.0), 0.1);
}

TEST(GPT, DropsOutOnlyInTraining) {
  auto options = small_gpt_options();
  options.dropout = 0.5;
  GPT model(options);
  const auto tokens = torch::randint(256, {2, 12});
  EXPECT_FALSE(at::equal(model(tokens), model(tokens)));
  model->eval();
  EXPECT_TRUE(at::equal(model(tokens), model(tokens)));
}

TEST(GPT, NamesImpossibleSizes) {
  const auto expect_refused = [](auto change, const char* message) {
    auto options = small_gpt_options();
    change(options);
    EXPECT_ERROR(GPT{options}, c10::ValueError, message);
  };
  expect_refused([](auto& o) { o.dim = 18; }, "18 is not a multiple of 4. Hint: dim 20 is.");
  expect_refused([](auto& o) { o.num_heads = 0; }, "num_heads must be at least 1, but is 0");
  expect_refused([](auto& o) { o.num_layers = -1; }, "num_layers must be at least 1, but is -1");
  expect_refused([](auto& o) { o.seq_len = 0; }, "seq_len must be at least 1");
  expect_refused([](auto& o) { o.dropout = 1.0; }, "dropout must lie in [0, 1), but is 1");
}

}  // namespace
}  // namespace fsdp::train
