#include "apps/run_program.h"

#include <sstream>
#include <vector>

#include "support/child_process.h"

namespace fsdp::testing {

Outcome run_fsdp(const std::string& arguments) {
  std::vector<std::string> argv{FSDP_PROGRAM};
  std::istringstream words(arguments);
  for (std::string word; words >> word;) {
    argv.push_back(word);
  }
  ChildProcess child(argv, {{"RANK", std::nullopt}, {"WORLD_SIZE", std::nullopt}, {"LOCAL_RANK", std::nullopt}});
  const auto status = child.wait(std::chrono::seconds(120));
  if (!status) {
    return {-1, "still running after two minutes:\n" + child.output()};
  }
  return {status->code, child.output()};
}

Outcome run_fsdp_ranks(int num_ranks, const std::string& arguments) {
  if (num_ranks == 0) {
    return run_fsdp(arguments);
  }
  return run_fsdp("run --nproc-per-node " + std::to_string(num_ranks) + " -- " + FSDP_PROGRAM + " " + arguments);
}

}  // namespace fsdp::testing
