#include "comm/libtorch_version.h"

#include <ATen/Version.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/headeronly/version.h>

namespace fsdp::comm {
namespace {

std::string without_patch(const std::string& version) { return version.substr(0, version.rfind('.')); }

}  // namespace

std::string version_in_config(const std::string& config) {
  constexpr std::string_view key = "TORCH_VERSION=";
  const auto at = config.find(key);
  if (at == std::string::npos) return "";
  const auto begin = at + key.size();
  return config.substr(begin, config.find_first_not_of("0123456789.", begin) - begin);
}

std::string libtorch_version_problem(const std::string& compiled, const std::string& loaded) {
  if (loaded.empty() || without_patch(compiled) == without_patch(loaded)) return "";
  return c10::str("fsdp was compiled for LibTorch ", compiled, ", but LibTorch ", loaded,
                  " was loaded: check LD_LIBRARY_PATH and the rpath of the program");
}

void check_libtorch_version() {
  static const std::string problem = libtorch_version_problem(TORCH_VERSION, version_in_config(at::show_config()));
  TORCH_CHECK(problem.empty(), problem);
}

}  // namespace fsdp::comm
