// The one program of this project; each subcommand lives in a file of its own.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <string>
#include <vector>

#include "commands.h"
#include "split_program.h"

int main(int argc, char** argv) {
  CLI::App app{"FSDP2 for C++: launch and train sharded models", "fsdp"};
  app.require_subcommand(1);
  int exit_code = 0;
  std::vector<std::string> program;
  fsdp::apps::add_run_command(app, program, exit_code);
  fsdp::apps::add_train_command(app, exit_code);

  std::vector<std::string> arguments(argv + 1, argv + argc);
  program = fsdp::apps::split_program(app, arguments);
  std::reverse(arguments.begin(), arguments.end());  // CLI11 takes the last one first
  try {
    app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  return exit_code;
}
