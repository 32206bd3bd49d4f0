#include "line_relay.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <tuple>
#include <utility>

namespace fsdp::apps {
namespace {

constexpr size_t kLongestLine = 1 << 16;  // a longer one is cut, so that memory stays bounded

void write_all(int fd, const std::string& text) {
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t count = write(fd, text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) {  // somebody made our output non-blocking, and its reader is slow
      pollfd place{fd, POLLOUT, 0};
      std::ignore = poll(&place, 1, /*timeout=*/-1);
      continue;
    }
    if (count <= 0) return;  // whoever read our output is gone: the workers go on
    done += count;
  }
}

}  // namespace

LineRelay::LineRelay(int input_fd, int output_fd, std::string prefix)
    : input_fd_(input_fd), output_fd_(output_fd), prefix_(std::move(prefix)) {
  fcntl(input_fd_, F_SETFL, fcntl(input_fd_, F_GETFL) | O_NONBLOCK);
}

LineRelay::~LineRelay() {
  if (is_open()) close(input_fd_);
}

void LineRelay::relay_available() {
  std::array<char, 1 << 14> buffer{};
  while (is_open()) {
    const ssize_t count = read(input_fd_, buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return;  // nothing more for now
    if (count == 0) {
      finish();
      return;
    }
    pending_.append(buffer.data(), count);
    write_complete_lines();
  }
}

void LineRelay::write_complete_lines() {
  std::string text;
  size_t start = 0;
  for (size_t end = pending_.find('\n'); end != std::string::npos; end = pending_.find('\n', start)) {
    text += prefix_ + pending_.substr(start, end + 1 - start);
    start = end + 1;
  }
  pending_.erase(0, start);
  if (pending_.size() > kLongestLine) text += prefix_ + std::exchange(pending_, "") + "\n";
  write_all(output_fd_, text);
}

void LineRelay::finish() {
  if (!is_open()) return;
  if (!pending_.empty()) write_all(output_fd_, prefix_ + std::exchange(pending_, "") + "\n");
  close(std::exchange(input_fd_, -1));
}

}  // namespace fsdp::apps
