#pragma once
// Is the LibTorch that was loaded the one this library was compiled for? libtorch.so carries no version in its name, so
// the loader takes whichever it finds first.
#include <string>

namespace fsdp::comm {

// Once in a process. Errors: c10::Error naming both versions.
void check_libtorch_version();

// A complaint, or "" when `loaded` (such as "2.13.1") agrees with `compiled` in all but the patch number. Empty
// `loaded` (a build that does not say) agrees.
[[nodiscard]] std::string libtorch_version_problem(const std::string& compiled, const std::string& loaded);

// The version in at::show_config()'s text, or "".
[[nodiscard]] std::string version_in_config(const std::string& config);

}  // namespace fsdp::comm
