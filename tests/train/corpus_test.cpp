#include "train/corpus.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "support/errors.h"

namespace fsdp::train {
namespace {

namespace fs = std::filesystem;

// A folder of its own for each test, removed afterwards.
class CorpusTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::path(::testing::TempDir()) / ("corpus_" + std::string(test->name()) + "_" + std::to_string(getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& text) {
    const auto path = folder_ / name;
    fs::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << text;
    return path.string();
  }

  static std::string text_of(const at::Tensor& bytes) {
    return {reinterpret_cast<const char*>(bytes.const_data_ptr<uint8_t>()), static_cast<size_t>(bytes.numel())};
  }

  fs::path folder_;
  CorpusOptions options_{.seq_len = 4, .val_fraction = 0.25};
};

TEST_F(CorpusTest, SplitsByPosition) {
  const auto corpus = Corpus::load({write("a.txt", "abcdefghijklmnopqrst")}, options_);
  EXPECT_EQ(text_of(corpus.train()), "abcdefghijklmno");
  EXPECT_EQ(text_of(corpus.validation()), "pqrst");
  EXPECT_EQ(corpus.num_files(), 1);
}

TEST_F(CorpusTest, ReadsFoldersRecursivelyInSortedOrder) {
  write("b.txt", "bbbbbbbbbb");
  write("a/z.txt", "zzzzz");
  write("a/y.txt", "yyyyy");
  const auto corpus = Corpus::load({folder_.string()}, options_);
  EXPECT_EQ(text_of(corpus.train()) + text_of(corpus.validation()), "yyyyyzzzzzbbbbbbbbbb");
  EXPECT_EQ(corpus.num_files(), 3);
}

TEST_F(CorpusTest, LeavesOutBinaryAndEmptyFilesOfAFolder) {
  write("a.bin", std::string("text\0with a zero", 16));
  write("b.txt", "");
  write("c.txt", "a text that is long enough for two parts");
  const auto corpus = Corpus::load({folder_.string()}, options_);
  EXPECT_EQ(corpus.num_files(), 1);
  ASSERT_EQ(corpus.skipped().size(), 2U);
  EXPECT_EQ(corpus.skipped()[0], (folder_ / "a.bin").string() + ": binary");
  EXPECT_EQ(corpus.skipped()[1], (folder_ / "b.txt").string() + ": empty");
}

TEST_F(CorpusTest, KeepsEveryByte) {
  const std::string text = "tab\t, umlaut \xc3\xa4, latin \xe4, newline\r\n and more text";
  const auto corpus = Corpus::load({write("a.txt", text)}, options_);
  EXPECT_EQ(text_of(corpus.train()) + text_of(corpus.validation()), text);
}

TEST_F(CorpusTest, StopsAtMaxBytes) {
  options_.max_bytes = 24;
  write("a.txt", "aaaaaaaaaaaaaaaaaaaa");
  write("b.txt", "bbbbbbbbbbbbbbbbbbbb");
  const auto corpus = Corpus::load({folder_.string()}, options_);
  EXPECT_EQ(text_of(corpus.train()) + text_of(corpus.validation()), "aaaaaaaaaaaaaaaaaaaabbbb");
}

TEST_F(CorpusTest, ReadsNoFileBeyondMaxBytes) {
  options_.max_bytes = 20;
  const std::vector<std::string> paths{write("a.txt", "aaaaaaaaaaaaaaaaaaaa"), write("b.txt", "bbbb")};
  EXPECT_EQ(Corpus::load(paths, options_).num_files(), 1);
  EXPECT_ERROR((void)Corpus::load({paths[0], "/no/such/file"}, options_), c10::ValueError, "no such file");
}

TEST_F(CorpusTest, RefusesWhatCannotBeTrainedOn) {
  EXPECT_ERROR((void)Corpus::load({}, options_), c10::ValueError, "at least one file or folder");
  EXPECT_ERROR((void)Corpus::load({"/no/such/file"}, options_), c10::ValueError,
               "no such file or folder: /no/such/file");
  EXPECT_ERROR((void)Corpus::load({write("empty.txt", "")}, options_), c10::ValueError, "empty.txt is empty");
  EXPECT_ERROR((void)Corpus::load({write("zero.bin", std::string(64, '\0'))}, options_), c10::ValueError,
               "zero.bin is a binary file");
  EXPECT_ERROR((void)Corpus::load({"/dev/null"}, options_), c10::ValueError, "neither a regular file nor a folder");
}

TEST_F(CorpusTest, RefusesAFolderWithoutText) {
  EXPECT_ERROR((void)Corpus::load({folder_.string()}, options_), c10::ValueError, "no text found under");
  write("zero.bin", std::string(64, '\0'));
  EXPECT_ERROR((void)Corpus::load({folder_.string()}, options_), c10::ValueError, "1 files were empty or binary");
}

TEST(CorpusChecks, NamesTheShortPart) {
  EXPECT_ERROR((void)Corpus::from_text("abcdefgh", {.seq_len = 4, .val_fraction = 0.25}), c10::ValueError,
               "the validation part of the text has 2 bytes, but one sequence needs seq_len + 1 = 5");
  EXPECT_ERROR((void)Corpus::from_text("abcdefgh", {.seq_len = 4, .val_fraction = 0.75}), c10::ValueError,
               "the training part of the text has 2 bytes");
  EXPECT_ERROR((void)Corpus::from_text("abcdefgh", {.seq_len = 4, .val_fraction = 1.0}), c10::ValueError,
               "val_fraction must lie in (0, 1)");
  const auto just_enough = Corpus::from_text("abcdefghij", {.seq_len = 4, .val_fraction = 0.5});
  EXPECT_EQ(just_enough.train().numel(), 5);
  EXPECT_EQ(just_enough.validation().numel(), 5);
}

TEST(CorpusChecks, ChecksumSeesEveryByte) {
  const CorpusOptions options{.seq_len = 2, .val_fraction = 0.5};
  const auto checksum = [&](const std::string& text) { return Corpus::from_text(text, options).checksum(); };
  EXPECT_EQ(checksum("abcdefgh"), checksum("abcdefgh"));
  EXPECT_NE(checksum("abcdefgh"), checksum("abcdefgi"));
  EXPECT_NE(checksum("abcdefgh"), checksum("bacdefgh"));
}

TEST(CorpusChecks, TellsTextFromBinary) {
  EXPECT_FALSE(looks_binary("int main() {\r\n\treturn 0;\f}\n"));
  EXPECT_FALSE(looks_binary("\x1b[1mbold\x1b[0m \xd0\x9f\xd1\x80"));
  EXPECT_TRUE(looks_binary(std::string("ELF\0", 4)));
  EXPECT_TRUE(looks_binary("\x01\x02\x03\x04 data"));
}

}  // namespace
}  // namespace fsdp::train
