#pragma once
// Copies what a worker prints, line by line, with a prefix that says who printed it.
#include <string>

namespace fsdp::apps {

class LineRelay {
 public:
  // Reads from `input_fd` (owned, made non-blocking), writes to `output_fd` (not owned).
  LineRelay(int input_fd, int output_fd, std::string prefix);
  ~LineRelay();
  LineRelay(const LineRelay&) = delete;
  LineRelay& operator=(const LineRelay&) = delete;

  [[nodiscard]] int input_fd() const { return input_fd_; }
  [[nodiscard]] bool is_open() const { return input_fd_ >= 0; }

  void relay_available();
  void finish();  // what is left, ended by a newline, and closes the input

 private:
  void write_complete_lines();

  int input_fd_;
  int output_fd_;
  std::string prefix_;
  std::string pending_;
};

}  // namespace fsdp::apps
