// What a worker prints arrives whole, also where the launcher's own output does not block.
#include "line_relay.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <thread>

namespace fsdp::apps {
namespace {

std::string read_all(int fd) {
  std::string text;
  std::array<char, 4096> buffer{};
  for (ssize_t count = 0; (count = read(fd, buffer.data(), buffer.size())) > 0;) text.append(buffer.data(), count);
  return text;
}

TEST(LineRelay, WaitsForASlowReaderOfANonBlockingPipe) {
  std::array<int, 2> input{};
  std::array<int, 2> output{};
  ASSERT_EQ(pipe(input.data()), 0);
  ASSERT_EQ(pipe(output.data()), 0);
  fcntl(output[1], F_SETFL, O_NONBLOCK);
  std::string expected;
  std::thread worker([&] {  // more than a pipe holds
    std::string text;
    for (int i = 0; i < 20'000; ++i) text += "line " + std::to_string(i) + "\n";
    for (size_t done = 0; done < text.size();) done += write(input[1], text.data() + done, text.size() - done);
    close(input[1]);
  });
  for (int i = 0; i < 20'000; ++i) expected += "[w] line " + std::to_string(i) + "\n";
  std::string arrived;
  std::thread reader([&] { arrived = read_all(output[0]); });
  LineRelay relay(input[0], output[1], "[w] ");
  while (relay.is_open()) relay.relay_available();
  close(output[1]);
  worker.join();
  reader.join();
  close(output[0]);
  EXPECT_TRUE(arrived == expected) << arrived.size() << " of " << expected.size() << " bytes";
}

}  // namespace
}  // namespace fsdp::apps
