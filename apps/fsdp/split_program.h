#pragma once
// `fsdp run OPTIONS PROGRAM ARGUMENTS`: what belongs to the launcher, and what to the program.
#include <CLI/App.hpp>
#include <algorithm>
#include <string>
#include <vector>

namespace fsdp::apps {

// For the subcommand "run", removes PROGRAM and all that follows from `arguments` and returns it, untouched by option
// parsing; "--" may stand before PROGRAM. For other subcommands returns nothing.
[[nodiscard]] std::vector<std::string> split_program(const CLI::App& app, std::vector<std::string>& arguments);

}  // namespace fsdp::apps
