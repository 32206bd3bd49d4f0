// `fsdp train --activation-checkpoint`: the same numbers with less memory, on the GPT of ./dev demo.
#include <fsdp/activation_checkpoint.h>
#include <fsdp/saved_tensor_hooks.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>
#include <sstream>

#include "support/live_bytes.h"
#include "train/trainer.h"

namespace fsdp::train {
namespace {

using fsdp::testing::LiveBytes;
using ::testing::HasSubstr;
using ::testing::Not;

// What one of two ranks of the demo computes in a step.
GPTOptions demo_options(bool activation_checkpoint) {
  return {.seq_len = 64, .dim = 96, .num_heads = 4, .num_layers = 3, .activation_checkpoint = activation_checkpoint};
}
constexpr int64_t kDemoRows = 8;

at::Tensor demo_loss(GPT& model) {
  const auto tokens = torch::arange(kDemoRows * 64).remainder(256).view({kDemoRows, 64});
  return torch::nn::functional::cross_entropy(model(tokens).flatten(0, 1), tokens.flatten());
}

// Bytes of what autograd saves, parameters apart, each storage once; as a pack hook sees them.
int64_t saved_bytes(bool activation_checkpoint) {
  GPT model(demo_options(activation_checkpoint));
  std::set<const void*> seen;
  for (const auto& parameter : model->parameters()) seen.insert(parameter.storage().unsafeGetStorageImpl());
  int64_t bytes = 0;
  const SavedTensorHooks hooks([&](const at::Tensor& x) {
    if (seen.insert(x.storage().unsafeGetStorageImpl()).second) bytes += static_cast<int64_t>(x.storage().nbytes());
    return [x] { return x; };
  });
  const auto loss = demo_loss(model);
  return bytes;
}

TEST(ActivationCheckpoint, SavesAThirdAtMostOnTheDemoGpt) {
  const auto without = saved_bytes(false), with = saved_bytes(true);
  RecordProperty("saved_bytes_without", std::to_string(without));
  RecordProperty("saved_bytes_with", std::to_string(with));
  EXPECT_LE(3 * with, without);
  // Three inputs of blocks, and what norm, head and loss save.
  EXPECT_GE(with, 3 * kDemoRows * 64 * 96 * 4);
}

struct StepBytes {
  int64_t after_forward, peak;
};

// At the allocator, from the first operator of forward to the end of backward, parameters and gradients apart.
StepBytes bytes_of_step(bool activation_checkpoint) {
  GPT model(demo_options(activation_checkpoint));
  demo_loss(model).backward();  // gradients exist from here on
  const LiveBytes bytes;
  const auto loss = demo_loss(model);
  const auto after_forward = bytes.current();
  loss.backward();
  return {after_forward, bytes.peak()};
}

TEST(ActivationCheckpoint, HalvesThePeakOfAStepOfTheDemoGpt) {
  const auto without = bytes_of_step(false), with = bytes_of_step(true);
  RecordProperty("step_peak_without", std::to_string(without.peak));
  RecordProperty("step_peak_with", std::to_string(with.peak));
  EXPECT_LE(3 * with.after_forward, without.after_forward);
  EXPECT_LE(2 * with.peak, without.peak);
}

struct Outcome {
  double validation_loss;
  std::string output;
};

Outcome train_small(bool activation_checkpoint) {
  at::set_num_threads(1);
  TrainOptions options;
  options.model = {.seq_len = 16, .dim = 16, .num_heads = 2, .num_layers = 2, .dropout = 0.2};
  options.model.activation_checkpoint = activation_checkpoint;
  options.schedule = {.peak = 1e-2, .min_factor = 0.1, .warmup_steps = 2, .num_steps = 12};
  options.batch_size = 8;
  options.num_eval_windows = 8;
  options.sample.num_bytes = 4;
  options.validate();
  std::string text;
  for (int i = 0; i < 300; ++i) text += "shard " + std::to_string(i * i % 31) + " gather\n";
  std::ostringstream out;
  Trainer trainer(options, Corpus::from_text(text, {.seq_len = 16, .val_fraction = 0.1}), World::alone(), out, false);
  const double loss = trainer.run();
  return {loss, out.str()};
}

TEST(ActivationCheckpoint, TrainsToTheSameNumberWithDropout) {
  const auto without = train_small(false), with = train_small(true);
  EXPECT_EQ(without.validation_loss, with.validation_loss);
  EXPECT_THAT(with.output, HasSubstr("recompute  each block in backward; only its input is kept"));
  EXPECT_THAT(without.output, Not(HasSubstr("recompute")));
  EXPECT_THAT(without.output, HasSubstr("off        activation checkpointing, "));
}

}  // namespace
}  // namespace fsdp::train
