#include "split_program.h"

namespace fsdp::apps {
namespace {

bool takes_next_argument(const CLI::App& command, const std::string& argument) {
  if (argument.find('=') != std::string::npos) return false;
  const auto* option = command.get_option_no_throw(argument);
  return option != nullptr && option->get_items_expected_min() > 0;
}

// Index of PROGRAM, or of the "--" before it.
size_t find_program(const CLI::App& command, const std::vector<std::string>& arguments) {
  size_t index = 1;
  while (index < arguments.size()) {
    const auto& argument = arguments[index];
    if (argument == "--" || !argument.starts_with("-")) break;
    index += takes_next_argument(command, argument) ? 2 : 1;
  }
  return std::min(index, arguments.size());
}

}  // namespace

std::vector<std::string> split_program(const CLI::App& app, std::vector<std::string>& arguments) {
  if (arguments.empty() || arguments[0] != "run") return {};
  const size_t start = find_program(*app.get_subcommand("run"), arguments);
  std::vector<std::string> program(arguments.begin() + static_cast<std::ptrdiff_t>(start), arguments.end());
  arguments.resize(start);
  if (!program.empty() && program[0] == "--") program.erase(program.begin());
  return program;
}

}  // namespace fsdp::apps
