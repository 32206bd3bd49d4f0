#pragma once
// Text files as byte tokens, split by position into a training and a validation part.
//
//   auto corpus = Corpus::load({"/usr/share/common-licenses"}, {.seq_len = 128, .val_fraction = 0.1});
//   corpus.train();   // uint8 [N]
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::train {

struct CorpusOptions {
  int64_t seq_len = 128;      // each part must hold at least one sequence and the byte that follows it
  double val_fraction = 0.1;  // of the bytes, taken from the end
  int64_t max_bytes = 0;      // read no more than this; 0: everything
};

class Corpus {
 public:
  // Reads files as given, and folders with all below them in sorted order. Inside a folder, empty and binary files are
  // left out (see skipped()); a file named directly must be text. Purely local: no rank talks to another.
  // Errors: c10::ValueError for a path that does not exist, an unreadable or binary file, no text at all, or a part
  // that is shorter than seq_len + 1 bytes.
  [[nodiscard]] static Corpus load(const std::vector<std::string>& paths, const CorpusOptions& options);

  // The same split of bytes that are in memory already.
  [[nodiscard]] static Corpus from_text(const std::string& text, const CorpusOptions& options);

  [[nodiscard]] const at::Tensor& train() const { return train_; }            // uint8 [N]
  [[nodiscard]] const at::Tensor& validation() const { return validation_; }  // uint8 [M]
  [[nodiscard]] int64_t num_files() const { return num_files_; }
  [[nodiscard]] const std::vector<std::string>& skipped() const { return skipped_; }  // "path: why"

  // Differs when any byte does; ranks compare it so that none trains on other text.
  [[nodiscard]] int64_t checksum() const;

 private:
  at::Tensor train_, validation_;
  int64_t num_files_ = 0;
  std::vector<std::string> skipped_;
};

// True when `text` has a NUL byte or more than a tenth of control characters: not something to learn byte by byte.
[[nodiscard]] bool looks_binary(const std::string& text);

}  // namespace fsdp::train
