#include "train/corpus.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "train/option_checks.h"

namespace fsdp::train {
namespace {

namespace fs = std::filesystem;

// Collects the text of files until the wanted number of bytes is there.
class TextReader {
 public:
  explicit TextReader(int64_t max_bytes) : max_bytes_(max_bytes) {}

  void add_path(const std::string& path) {
    std::error_code error;
    const auto status = fs::status(path, error);
    TORCH_CHECK_VALUE(fs::exists(status), "no such file or folder: ", path);
    if (fs::is_directory(status)) {
      add_folder(path);
      return;
    }
    TORCH_CHECK_VALUE(fs::is_regular_file(status), path, " is neither a regular file nor a folder");
    if (full()) return;
    const auto text = read(path);
    TORCH_CHECK_VALUE(!text.empty(), path, " is empty");
    TORCH_CHECK_VALUE(!looks_binary(text), path, " is a binary file; training reads plain text");
    append(text);
  }

  std::string text;
  int64_t num_files = 0;
  std::vector<std::string> skipped;

 private:
  [[nodiscard]] bool full() const { return max_bytes_ > 0 && static_cast<int64_t>(text.size()) >= max_bytes_; }

  static std::string read(const fs::path& path) {
    std::ifstream stream(path, std::ios::binary);
    TORCH_CHECK_VALUE(stream.is_open(), "cannot read ", path.string(), ": ", std::strerror(errno));
    std::string bytes{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
    TORCH_CHECK_VALUE(!stream.bad(), "reading ", path.string(), " failed half way");
    return bytes;
  }

  void append(const std::string& bytes) {
    const auto room = max_bytes_ > 0 ? static_cast<size_t>(max_bytes_) - text.size() : bytes.size();
    text.append(bytes, 0, std::min(room, bytes.size()));
    ++num_files;
  }

  void add_folder(const std::string& folder) {
    std::vector<fs::path> files;
    for (const auto& entry : fs::recursive_directory_iterator(folder, fs::directory_options::skip_permission_denied)) {
      if (entry.is_regular_file() && !entry.is_symlink()) {  // a link would give the same text twice
        files.push_back(entry.path());
      }
    }
    std::sort(files.begin(), files.end());  // the order of directory entries differs between machines
    for (const auto& file : files) {
      if (full()) {
        return;
      }
      const auto bytes = read(file);
      if (bytes.empty() || looks_binary(bytes)) {
        skipped.push_back(file.string() + (bytes.empty() ? ": empty" : ": binary"));
        continue;
      }
      append(bytes);
    }
  }

  int64_t max_bytes_;
};

void check_part(const char* name, int64_t num_bytes, const CorpusOptions& options, int64_t total) {
  TORCH_CHECK_VALUE(num_bytes > options.seq_len, "the ", name, " part of the text has ", num_bytes,
                    " bytes, but one sequence needs seq_len + 1 = ", options.seq_len + 1,
                    ". Hint: give more text than ", total, " bytes, a shorter --seq-len, or another --val-fraction.");
}

at::Tensor as_bytes(const char* data, int64_t num_bytes) {
  auto tensor = at::empty({num_bytes}, at::kByte);
  std::memcpy(tensor.mutable_data_ptr<uint8_t>(), data, static_cast<size_t>(num_bytes));
  return tensor;
}

}  // namespace

bool looks_binary(const std::string& text) {
  int64_t num_control = 0;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte == 0) {
      return true;
    }
    const bool is_layout = byte >= '\a' && byte <= '\r';  // bell, backspace, tab, newline, ...
    num_control += (byte < ' ' && !is_layout && byte != '\x1b') || byte == 0x7f;
  }
  return num_control * 10 > static_cast<int64_t>(text.size());
}

Corpus Corpus::from_text(const std::string& text, const CorpusOptions& options) {
  check_at_least("seq_len", options.seq_len, 1);
  TORCH_CHECK_VALUE(options.val_fraction > 0.0 && options.val_fraction < 1.0,
                    "val_fraction must lie in (0, 1), but is ", options.val_fraction);
  const auto total = static_cast<int64_t>(text.size());
  const auto num_validation = static_cast<int64_t>(std::llround(static_cast<double>(total) * options.val_fraction));
  const auto num_train = total - num_validation;
  check_part("training", num_train, options, total);
  check_part("validation", num_validation, options, total);
  Corpus corpus;
  corpus.train_ = as_bytes(text.data(), num_train);
  corpus.validation_ = as_bytes(text.data() + num_train, num_validation);
  return corpus;
}

Corpus Corpus::load(const std::vector<std::string>& paths, const CorpusOptions& options) {
  TORCH_CHECK_VALUE(!paths.empty(), "no text to train on: give at least one file or folder");
  TORCH_CHECK_VALUE(options.max_bytes >= 0, "max_bytes must not be negative, but is ", options.max_bytes);
  TextReader reader(options.max_bytes);
  for (const auto& path : paths) {
    reader.add_path(path);
  }
  TORCH_CHECK_VALUE(!reader.text.empty(), "no text found under ", paths.front(),
                    paths.size() > 1 ? " and the other paths" : "", ": ", reader.skipped.size(),
                    " files were empty or binary");
  auto corpus = from_text(reader.text, options);
  corpus.num_files_ = reader.num_files;
  corpus.skipped_ = std::move(reader.skipped);
  return corpus;
}

int64_t Corpus::checksum() const {
  uint64_t hash = 0xcbf29ce484222325ULL;  // FNV-1a
  for (const auto& part : {train_, validation_}) {
    const auto* bytes = part.const_data_ptr<uint8_t>();
    for (int64_t i = 0; i < part.numel(); ++i) {
      hash = (hash ^ bytes[i]) * 0x100000001b3ULL;
    }
  }
  return static_cast<int64_t>(hash);
}

}  // namespace fsdp::train
