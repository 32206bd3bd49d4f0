#pragma once
// The subcommands of the fsdp program: each adds itself, and sets the exit code when it runs.
#include <CLI/App.hpp>
#include <string>
#include <vector>

namespace fsdp::apps {

// `program` is what to start, filled before parsing; see split_program.h.
void add_run_command(CLI::App& app, const std::vector<std::string>& program, int& exit_code);
void add_train_command(CLI::App& app, int& exit_code);

}  // namespace fsdp::apps
