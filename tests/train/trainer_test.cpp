// The training loop in one plain process; over several ranks it is tested as a program, in tests/apps.
#include "train/trainer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <sstream>

#include "support/errors.h"
#include "support/run_ranks.h"

namespace fsdp::train {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

// Text with something to learn: one of four words after the other.
Corpus small_corpus(int64_t seq_len) {
  static constexpr const char* kWords[] = {"shard ", "gather ", "reduce ", "scatter\n"};
  std::string text;
  for (uint64_t i = 0, state = 1; i < 600; ++i) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    text += kWords[state >> 62];
  }
  return Corpus::from_text(text, {.seq_len = seq_len, .val_fraction = 0.1});
}

TrainOptions small_options() {
  TrainOptions options;
  options.model = {.seq_len = 16, .dim = 16, .num_heads = 2, .num_layers = 2};
  options.schedule = {.peak = 1e-2, .min_factor = 0.1, .warmup_steps = 2, .num_steps = 30};
  options.batch_size = 8;
  options.num_eval_windows = 8;
  options.sample.num_bytes = 12;
  return options;
}

struct Run {
  double validation_loss;
  std::string output;
};

Run run_training(const TrainOptions& options, bool is_terminal = false) {
  at::set_num_threads(1);  // tiny matrices: threads would only wait for each other
  options.validate();
  std::ostringstream out;
  Trainer trainer(options, small_corpus(options.model.seq_len), World::alone(), out, is_terminal);
  const double loss = trainer.run();
  return {loss, out.str()};
}

std::vector<double> losses_of(const std::string& output) {
  std::vector<double> losses;
  for (size_t at = output.find("  loss: "); at != std::string::npos; at = output.find("  loss: ", at + 1)) {
    losses.push_back(std::stod(output.substr(at + 8)));
  }
  return losses;
}

TEST(Trainer, Learns) {
  const auto result = run_training(small_options());
  const auto losses = losses_of(result.output);
  ASSERT_EQ(losses.size(), 4U);  // steps 1, 10, 20, 30
  EXPECT_NEAR(losses.front(), std::log(256.0), 0.1);
  EXPECT_LT(losses.back(), 3.0);
  EXPECT_LT(result.validation_loss, 3.0);
}

TEST(Trainer, PrintsTableStepsSampleAndLastTheValidationLoss) {
  const auto output = run_training(small_options()).output;
  EXPECT_THAT(output, HasSubstr("model      GPT of 2 layers, dim 16, 2 heads, seq_len 16, 256 byte tokens: "));
  EXPECT_THAT(output, HasSubstr("sharding   none: one process without a launcher\n"));
  EXPECT_THAT(output, HasSubstr("batch      8 sequences a step = 1 x 1 x 8 (ranks x micro batches x sequences)\n"));
  EXPECT_THAT(output, ContainsRegex("step: 30/30  loss:  [0-9.]+  grad_norm:  +[0-9.]+  lr: 1.00e-03  memory: "
                                    "[0-9.]+GiB  tokens/s: [0-9,]+  eta: 0:00:00\n"));
  EXPECT_THAT(output, HasSubstr("\nsample, 12 bytes after \"\\n\":\n"));
  EXPECT_THAT(output, ContainsRegex("\nvalidation loss: [0-9]\\.[0-9]+ nats/byte\n$"));
}

TEST(Trainer, SaysTheSameEachTime) {
  EXPECT_EQ(losses_of(run_training(small_options()).output), losses_of(run_training(small_options()).output));
  EXPECT_EQ(run_training(small_options()).validation_loss, run_training(small_options()).validation_loss);
  auto other = small_options();
  other.seed = 43;
  EXPECT_NE(run_training(small_options()).validation_loss, run_training(other).validation_loss);
}

TEST(Trainer, AccumulationChangesNothingButRounding) {
  auto options = small_options();
  options.schedule.num_steps = 5;
  const auto whole = run_training(options).validation_loss;
  options.gradient_accumulation_steps = 4;
  EXPECT_NEAR(run_training(options).validation_loss, whole, 1e-4);
}

TEST(Trainer, ClipsOnlyWhenAsked) {
  auto options = small_options();
  options.max_norm = 0.0;
  const auto free = run_training(options);
  EXPECT_THAT(free.output, Not(HasSubstr("clipped at norm")));
  EXPECT_NE(free.validation_loss, run_training(small_options()).validation_loss);
}

TEST(Trainer, ValidatesOnTheWay) {
  auto options = small_options();
  options.eval_interval = 10;
  const auto output = run_training(options).output;
  EXPECT_THAT(output, ContainsRegex("\nstep: 10  validation loss: [0-9.]+ nats/byte\n"));
  EXPECT_THAT(output, ContainsRegex("\nstep: 20  validation loss: [0-9.]+ nats/byte\n"));
  EXPECT_THAT(output, Not(HasSubstr("\nstep: 30  validation")));
}

TEST(Trainer, ATimeLimitShortensTheSchedule) {
  auto options = small_options();
  options.schedule.num_steps = 1000000;
  options.time_limit = 0.2;
  const auto output = run_training(options).output;
  EXPECT_THAT(output, ContainsRegex("\nthe time limit shortened the run to [0-9]+ steps\n"));
  EXPECT_THAT(output, ContainsRegex("\nvalidation loss: "));
}

TEST(Trainer, ATimeLimitThatIsOverAtOnceLeavesOneStep) {
  auto options = small_options();
  options.time_limit = 1e-20;
  EXPECT_THAT(run_training(options).output, HasSubstr("\nthe time limit shortened the run to 1 steps\n"));
}

TEST(Trainer, RanksThatWereGivenSomethingElseAreRefusedOnEveryRank) {
  testing::run_ranks(2, [](const ProcessGroup& group, int rank) {
    const auto world = World::over(DeviceMesh::from_group(group, at::kCPU));
    const auto train = [&](const TrainOptions& options, const Corpus& corpus) {
      std::ostringstream out;
      const Trainer trainer(options, corpus, world, out, /*is_terminal=*/false);
    };
    auto options = small_options();
    options.schedule.num_steps += rank;
    EXPECT_ERROR(train(options, small_corpus(16)), c10::ValueError, "steps 31");
    const auto corpus =
        Corpus::from_text(std::string(100, rank == 0 ? 'a' : 'b'), {.seq_len = 16, .val_fraction = 0.3});
    EXPECT_ERROR(train(small_options(), corpus), c10::ValueError, "the first rank has 'text of 70 + 30 bytes");
  });
}

TEST(Trainer, APlainModelLoadsWhatWasSaved) {
  auto options = small_options();
  options.save = ::testing::TempDir() + "trainer_saved_" + std::to_string(getpid()) + ".pt";
  const auto result = run_training(options);
  GPT loaded(options.model);
  torch::load(loaded, options.save);
  std::filesystem::remove(options.save);
  const auto corpus = small_corpus(options.model.seq_len);
  const FixedWindows windows(corpus.validation(), options.model.seq_len, options.num_eval_windows);
  EXPECT_EQ(validation_loss(loaded, windows, World::alone(), options.batch_size), result.validation_loss);
}

TEST(Trainer, StopsWhenTheLossIsNoNumber) {
  auto options = small_options();
  options.schedule.peak = 1e30;
  options.schedule.warmup_steps = 0;
  EXPECT_ERROR(run_training(options), c10::Error, "a lower --lr or more --warmup-steps");
}

TEST(Trainer, MatricesDecayAndNormsDoNot) {
  const auto options = small_options();
  const GPT model(options.model);
  const auto optimizer = make_optimizer(model, options);
  ASSERT_EQ(optimizer->param_groups().size(), 2U);
  for (const auto& group : optimizer->param_groups()) {
    const auto decay = static_cast<const torch::optim::AdamWOptions&>(group.options()).weight_decay();
    for (const auto& parameter : group.params()) {
      EXPECT_EQ(decay, parameter.dim() >= 2 ? options.weight_decay : 0.0);
    }
  }
}

TEST(TrainOptions, NameImpossibleValues) {
  const auto expect_refused = [](auto change, const char* message) {
    auto options = small_options();
    change(options);
    EXPECT_ERROR(options.validate(), c10::ValueError, message);
  };
  expect_refused([](auto& o) { o.model.dim = 15; }, "dim must be a multiple of num_heads");
  expect_refused([](auto& o) { o.model.vocab_size = 100; }, "vocab_size must be 256, but is 100");
  expect_refused([](auto& o) { o.batch_size = 0; }, "batch_size must be at least 1, but is 0");
  expect_refused([](auto& o) { o.log_interval = 0; }, "log_interval must be at least 1");
  expect_refused([](auto& o) { o.time_limit = -1; }, "time_limit must not be negative, but is -1");
  expect_refused([](auto& o) { o.save = "/no/such/folder/model.pt"; }, "there is no folder /no/such/folder");
  expect_refused([](auto& o) { o.save = ::testing::TempDir(); }, "it is a folder");
}

TEST(TrainOptions, BatchMustDivideOverTheRanks) {
  auto options = small_options();
  options.gradient_accumulation_steps = 2;
  EXPECT_NO_THROW(options.validate_for(4));
  EXPECT_ERROR(options.validate_for(3), c10::ValueError,
               "batch_size 8 does not divide evenly over 3 ranks x 2 micro batches. Hint: use a multiple of 6.");
}

}  // namespace
}  // namespace fsdp::train
