// `fsdp train` as its users run it: exit codes, messages, and the same numbers at every world size.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <regex>

#include "apps/run_program.h"
#include "train/corpus.h"
#include "train/evaluate.h"

namespace fsdp::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class TrainCommand : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::path(::testing::TempDir()) / ("train_" + std::string(test->name()) + "_" + std::to_string(getpid()));
    fs::create_directories(folder_);
    text_ = write("text.txt", some_text());
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& bytes) {
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
    return (folder_ / name).string();
  }

  static std::string some_text() {
    std::string text;
    for (int i = 0; i < 400; ++i) {
      text += "line " + std::to_string(i * i % 97) + " of a text to learn\n";
    }
    return text;
  }

  // A run of a few seconds; 12 sequences divide over 1, 2 and 3 ranks.
  [[nodiscard]] std::string small_run() const {
    return "train --data " + text_ +
           " --steps 10 --batch-size 12 --seq-len 16 --dim 16 --num-heads 2 --num-layers 2 --lr 0.01 --warmup-steps 2"
           " --eval-windows 10 --sample-bytes 8 --log-interval 1 --num-threads 1";
  }

  fs::path folder_;
  std::string text_;
};

// The numbers after `name`, in order.
std::vector<double> numbers_after(const std::string& name, const std::string& output) {
  const std::regex pattern(name + " +([0-9.]+)");
  std::vector<double> numbers;
  for (std::sregex_iterator it(output.begin(), output.end(), pattern), end; it != end; ++it) {
    numbers.push_back(std::stod((*it)[1]));
  }
  return numbers;
}

int count(const std::string& needle, const std::string& text) {
  int result = 0;
  for (auto at = text.find(needle); at != std::string::npos; at = text.find(needle, at + 1)) {
    ++result;
  }
  return result;
}

TEST_F(TrainCommand, LearnsInOnePlainProcess) {
  const auto outcome = run_fsdp(small_run());
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("sharding   none: one process without a launcher"));
  const auto losses = numbers_after("  loss:", outcome.output);
  ASSERT_EQ(losses.size(), 10U);
  EXPECT_LT(losses.back(), losses.front() - 1.0);
}

TEST_F(TrainCommand, SaysTheSameAtEveryWorldSize) {
  const auto plain = run_fsdp(small_run());
  ASSERT_EQ(plain.exit_code, 0) << plain.output;
  for (const int world_size : {1, 2, 3}) {
    const auto sharded = run_fsdp_ranks(world_size, small_run());
    ASSERT_EQ(sharded.exit_code, 0) << sharded.output;
    EXPECT_THAT(sharded.output, HasSubstr("fully_shard on 2 blocks and the root"));
    for (const char* name : {"  loss:", "grad_norm:", "validation loss:"}) {
      const auto expected = numbers_after(name, plain.output), numbers = numbers_after(name, sharded.output);
      ASSERT_EQ(numbers.size(), expected.size()) << name << " at " << world_size << " ranks:\n" << sharded.output;
      for (size_t i = 0; i < numbers.size(); ++i) {
        EXPECT_NEAR(numbers[i], expected[i], 2e-3) << name << " of line " << i << " at " << world_size << " ranks";
      }
      EXPECT_NEAR(numbers.front(), expected.front(), 2e-4) << name << " at " << world_size << " ranks";
    }
  }
}

// Blocks are sharded and run again in backward; numbers and file stay those of a plain run.
TEST_F(TrainCommand, SaysTheSameWithActivationCheckpointing) {
  const auto file = (folder_ / "model.pt").string();
  const auto plain = run_fsdp(small_run());
  const auto outcome = run_fsdp_ranks(2, small_run() + " --activation-checkpoint --save " + file);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("recompute  each block in backward; only its input is kept"));
  for (const char* name : {"  loss:", "validation loss:"}) {
    const auto expected = numbers_after(name, plain.output), numbers = numbers_after(name, outcome.output);
    ASSERT_EQ(numbers.size(), expected.size()) << outcome.output;
    for (size_t i = 0; i < numbers.size(); ++i) {
      EXPECT_NEAR(numbers[i], expected[i], 2e-3) << name << " of line " << i;
    }
  }
  train::GPT model(train::GPTOptions{.seq_len = 16, .dim = 16, .num_heads = 2, .num_layers = 2});
  EXPECT_NO_THROW(torch::load(model, file));
}

// Ranks share sequences: numbers stay those of a plain run.
TEST_F(TrainCommand, SaysTheSameWithContextParallelism) {
  const auto plain = run_fsdp(small_run());
  for (const int world_size : {2, 4}) {
    for (const std::string method : {"ulysses", "ring"}) {
      const auto outcome =
          run_fsdp_ranks(world_size, small_run() + " --context-parallel-degree 2 --context-parallel-method " + method);
      ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
      EXPECT_THAT(outcome.output, HasSubstr("sequences  each shared by 2 ranks"));
      for (const char* name : {"  loss:", "grad_norm:", "validation loss:"}) {
        const auto expected = numbers_after(name, plain.output), numbers = numbers_after(name, outcome.output);
        ASSERT_EQ(numbers.size(), expected.size()) << outcome.output;
        for (size_t i = 0; i < numbers.size(); ++i)
          EXPECT_NEAR(numbers[i], expected[i], 2e-3) << name << " of line " << i << ", " << method;
      }
    }
  }
}

TEST_F(TrainCommand, RefusesContextParallelismThatDoesNotFit) {
  const auto refusal = [&](int world_size, const std::string& options) {
    const auto outcome = run_fsdp_ranks(world_size, small_run() + options);
    EXPECT_NE(outcome.exit_code, 0) << options;
    return outcome.output;
  };
  EXPECT_THAT(refusal(2, " --context-parallel-degree 3"), HasSubstr("context_parallel_degree 3"));
  EXPECT_THAT(refusal(4, " --context-parallel-degree 4"), HasSubstr("num_heads 2 does not divide"));
  EXPECT_THAT(refusal(2, " --context-parallel-degree 2 --context-parallel-method rings"), HasSubstr("rings"));
  EXPECT_THAT(refusal(2, " --context-parallel-method ring"), HasSubstr("has no effect without"));
  EXPECT_THAT(refusal(2, " --context-parallel-degree 2 --context-parallel-method ring --dropout 0.1"),
              HasSubstr("Hint: --dropout 0"));
}

TEST_F(TrainCommand, APlainModelLoadsWhatShardedRanksSaved) {
  const auto file = (folder_ / "model.pt").string();
  const auto outcome = run_fsdp_ranks(2, small_run() + " --save " + file);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;

  train::GPT model(train::GPTOptions{.seq_len = 16, .dim = 16, .num_heads = 2, .num_layers = 2});
  torch::load(model, file);
  const auto corpus = train::Corpus::load({text_}, {.seq_len = 16, .val_fraction = 0.1});
  const train::FixedWindows windows(corpus.validation(), 16, 10);
  const auto printed = numbers_after("validation loss:", outcome.output);
  ASSERT_EQ(printed.size(), 1U);
  EXPECT_NEAR(train::validation_loss(model, windows, train::World::alone(), 10), printed.front(), 1e-4);
}

TEST_F(TrainCommand, AccumulatesOverShardedBackwards) {
  const auto whole = run_fsdp_ranks(2, small_run());
  const auto parts = run_fsdp_ranks(2, small_run() + " --gradient-accumulation-steps 3");
  ASSERT_EQ(parts.exit_code, 0) << parts.output;
  EXPECT_NEAR(numbers_after("validation loss:", parts.output).at(0),
              numbers_after("validation loss:", whole.output).at(0), 2e-3);
}

TEST_F(TrainCommand, RefusesBadTextOnAllRanksWithAClearMessage) {
  const auto empty = write("empty.txt", ""), binary = write("binary", std::string(99, '\0')),
             tiny = write("tiny", "ab");
  const std::vector<std::pair<std::string, std::string>> cases{
      {"/no/such/file", "no such file or folder: /no/such/file"},
      {empty, "is empty"},
      {binary, "is a binary file"},
      {tiny, "needs seq_len + 1 = 129"},
  };
  for (const auto& [path, message] : cases) {
    for (const int world_size : {0, 2}) {
      const auto outcome = run_fsdp_ranks(world_size, "train --data " + path);
      EXPECT_NE(outcome.exit_code, 0) << path;
      EXPECT_THAT(outcome.output, HasSubstr(message));
      EXPECT_GE(count("fsdp train: error:", outcome.output), 1) << outcome.output;
    }
  }
}

TEST_F(TrainCommand, RefusesImpossibleSizesOnAllRanksWithAClearMessage) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"--dim 15 --num-heads 2", "15 is not a multiple of 2"},
      {"--steps 0", "steps must be at least 1, but is 0"},
      {"--batch-size 3", "batch_size 3 does not divide evenly over 2 ranks x 1 micro batches"},
      {"--save /no/such/folder/model.pt", "there is no folder /no/such/folder"},
  };
  for (const auto& [arguments, message] : cases) {
    const auto outcome = run_fsdp_ranks(2, "train --data " + text_ + " " + arguments);
    EXPECT_NE(outcome.exit_code, 0) << arguments;
    EXPECT_THAT(outcome.output, HasSubstr(message));
    EXPECT_GE(count("fsdp train: error:", outcome.output), 1) << outcome.output;
  }
}

TEST_F(TrainCommand, RefusesUnknownAndMissingOptions) {
  const auto unknown = run_fsdp("train --data " + text_ + " --no-such-option 3");
  EXPECT_NE(unknown.exit_code, 0);
  EXPECT_THAT(unknown.output, HasSubstr("--no-such-option"));
  const auto missing = run_fsdp("train");
  EXPECT_NE(missing.exit_code, 0);
  EXPECT_THAT(missing.output, HasSubstr("--data is required"));
}

}  // namespace
}  // namespace fsdp::testing
