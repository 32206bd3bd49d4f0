// The LibTorch that was loaded must be the one that was compiled against.
#include "comm/libtorch_version.h"

#include <ATen/Version.h>
#include <gtest/gtest.h>
#include <torch/headeronly/version.h>

namespace fsdp::comm {
namespace {

TEST(LibTorchVersion, FoundInTheConfiguration) {
  EXPECT_EQ(version_in_config("MSVC=1, TORCH_VERSION=2.13.0, USE_CUDA=0"), "2.13.0");
  EXPECT_EQ(version_in_config("TORCH_VERSION=2.9.1"), "2.9.1");
  EXPECT_EQ(version_in_config("USE_CUDA=0"), "");
  EXPECT_EQ(version_in_config(at::show_config()), TORCH_VERSION);
}

TEST(LibTorchVersion, PatchesMayDiffer) {
  EXPECT_EQ(libtorch_version_problem("2.13.0", "2.13.0"), "");
  EXPECT_EQ(libtorch_version_problem("2.13.0", "2.13.4"), "");
  EXPECT_EQ(libtorch_version_problem("2.13.0", ""), "");
}

TEST(LibTorchVersion, AnotherVersionIsNamed) {
  const auto problem = libtorch_version_problem("2.13.0", "2.1.3");
  EXPECT_NE(problem.find("compiled for LibTorch 2.13.0, but LibTorch 2.1.3 was loaded"), std::string::npos) << problem;
}

}  // namespace
}  // namespace fsdp::comm
