#include "train/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iomanip>
#include <sstream>

namespace fsdp::train {
namespace {

std::string format_gib(int64_t bytes) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(2) << static_cast<double>(bytes) / (1 << 30) << "GiB";
  return out.str();
}

}  // namespace

std::string with_commas(int64_t number) {
  const auto digits = std::to_string(number);
  std::string result;
  for (size_t i = 0; i < digits.size(); ++i) {
    const bool follows_digit = i > 0 && digits[i - 1] != '-';
    if (follows_digit && (digits.size() - i) % 3 == 0) {
      result += ',';
    }
    result += digits[i];
  }
  return result;
}

std::string format_bytes(int64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024.0 && unit + 1 < std::size(kUnits); ++unit) {
    value /= 1024.0;
  }
  std::ostringstream out;
  out << std::fixed << std::setprecision(unit == 0 ? 0 : 2) << value << ' ' << kUnits[unit];
  return out.str();
}

std::string format_duration(double seconds) {
  const auto total = static_cast<int64_t>(std::llround(std::max(0.0, seconds)));
  std::ostringstream out;
  out << total / 3600 << ':' << std::setfill('0') << std::setw(2) << total / 60 % 60 << ':' << std::setw(2)
      << total % 60;
  return out.str();
}

int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t num_pages = 0, num_resident_pages = 0;
  statm >> num_pages >> num_resident_pages;
  return statm ? num_resident_pages * sysconf(_SC_PAGESIZE) : 0;
}

std::string format_step(const StepReport& report) {
  const auto num_steps = std::to_string(report.num_steps);
  std::ostringstream out;
  out << "step: " << std::setw(static_cast<int>(num_steps.size())) << report.step << '/' << num_steps;
  out << std::fixed << "  loss: " << std::setw(8) << std::setprecision(5) << report.loss;
  out << "  grad_norm: " << std::setw(7) << std::setprecision(4) << report.grad_norm;
  out << std::scientific << "  lr: " << std::setprecision(2) << report.lr;
  out << "  memory: " << format_gib(report.resident_bytes);
  if (report.sharded_bytes >= 0) {
    out << " (fsdp " << format_bytes(report.sharded_bytes) << ')';
  }
  out << "  tokens/s: " << with_commas(std::llround(report.tokens_per_second));
  out << "  eta: " << format_duration(report.seconds_left);
  return out.str();
}

Progress::Progress(std::ostream& out, bool is_terminal, bool quiet, int64_t log_interval)
    : out_(out), is_terminal_(is_terminal), quiet_(quiet), log_interval_(log_interval) {}

void Progress::step(const StepReport& report) {
  if (quiet_) {
    return;
  }
  if (is_terminal_) {
    out_ << '\r' << format_step(report) << "\x1b[K" << std::flush;  // the escape clears what a longer line left behind
    line_is_open_ = true;
    return;
  }
  if (report.step == 1 || report.is_last || report.step % log_interval_ == 0) {
    out_ << format_step(report) << std::endl;
  }
}

void Progress::line(const std::string& text) {
  if (quiet_) {
    return;
  }
  if (line_is_open_) {
    out_ << "\r\x1b[K";
    line_is_open_ = false;
  }
  out_ << text << std::endl;
}

void Progress::finish() {
  if (line_is_open_) {
    out_ << std::endl;
    line_is_open_ = false;
  }
}

}  // namespace fsdp::train
