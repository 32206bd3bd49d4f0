#pragma once
// The progress line: one line that is redrawn on a terminal, plain lines in a file or a pipe.
#include <cstdint>
#include <ostream>
#include <string>

namespace fsdp::train {

struct StepReport {
  int64_t step = 0;  // 1 is the first
  int64_t num_steps = 0;
  double loss = 0.0;       // mean over the joined batch, nats a byte
  double grad_norm = 0.0;  // before clipping
  double lr = 0.0;
  double tokens_per_second = 0.0;  // of all ranks together
  int64_t resident_bytes = 0;      // this process, as the kernel counts
  int64_t sharded_bytes = -1;      // shards and gathered parameters on this rank; -1: nothing is sharded
  double seconds_left = 0.0;
  bool is_last = false;
};

// One line, fields two spaces apart: "step:   20/1000  loss:  2.53120  grad_norm:  0.8123  lr: 3.00e-03  ...", then
// "memory: 0.31GiB (fsdp 20.00 MiB)", "tokens/s: 12,345" and "eta: 0:01:15".
[[nodiscard]] std::string format_step(const StepReport& report);

[[nodiscard]] std::string with_commas(int64_t number);      // 1234567 -> "1,234,567"
[[nodiscard]] std::string format_bytes(int64_t bytes);      // "1.66 MiB"
[[nodiscard]] std::string format_duration(double seconds);  // "0:01:15"
[[nodiscard]] int64_t resident_bytes();                     // of this process; 0 where the kernel does not tell

class Progress {
 public:
  // A report every log_interval steps, at the first and at the last. Ranks other than the first pass quiet.
  Progress(std::ostream& out, bool is_terminal, bool quiet, int64_t log_interval);

  void step(const StepReport& report);
  void line(const std::string& text);  // stands on its own line, above the redrawn one
  void finish();                       // the redrawn line stays as it is

 private:
  std::ostream& out_;
  bool is_terminal_;
  bool quiet_;
  bool line_is_open_ = false;
  int64_t log_interval_;
};

}  // namespace fsdp::train
