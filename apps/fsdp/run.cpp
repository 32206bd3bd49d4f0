// fsdp run: starts the workers of a job on this node and watches over them.
#include <c10/util/Exception.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <sstream>
#include <thread>

#include "comm/error_kinds.h"
#include "commands.h"
#include "launch_spec.h"
#include "supervisor.h"

namespace fsdp::apps {
namespace {

struct RunArguments {
  std::string num_workers = "1";
  std::string num_nodes = "1";
  std::string master_addr = "127.0.0.1";
  uint16_t master_port = 0;
  std::string role = "default";
  int shutdown_timeout = 30;
  bool standalone = false;
};

int parse_num_workers(const std::string& text) {
  if (text == "auto" || text == "cpu") return static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  TORCH_CHECK_VALUE(text != "gpu", "--nproc-per-node=gpu: this LibTorch sees no GPU; give a number, cpu or auto");
  int number = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  TORCH_CHECK_VALUE(error == std::errc() && stop == text.data() + text.size() && number >= 1, "--nproc-per-node is \"",
                    text, "\", but a number of workers, cpu or auto is needed");
  return number;
}

// As a shell would find it, so that a mistake is told once and not by every worker.
std::string find_program_file(const std::string& name) {
  const auto is_program = [](const std::filesystem::path& path) {
    std::error_code unreadable;
    return std::filesystem::is_regular_file(path, unreadable) && access(path.c_str(), X_OK) == 0;
  };
  if (name.find('/') != std::string::npos) {
    TORCH_CHECK_VALUE(is_program(name), "\"", name, "\" is not a program that can be run");
    return name;
  }
  const char* path = std::getenv("PATH");  // NOLINT(concurrency-mt-unsafe)
  std::istringstream folders(path != nullptr ? path : "");
  for (std::string folder; std::getline(folders, folder, ':');) {
    const auto candidate = std::filesystem::path(folder.empty() ? "." : folder) / name;
    if (is_program(candidate)) return candidate.string();
  }
  TORCH_CHECK_VALUE(false, "no program \"", name, "\" on the PATH; to run one in this folder write ./", name);
}

std::string make_run_id() {
  std::ifstream file("/proc/sys/kernel/random/uuid");
  std::string id;
  return std::getline(file, id) ? id : "run-" + std::to_string(getpid());
}

LaunchSpec make_launch_spec(const RunArguments& arguments, const std::vector<std::string>& program) {
  TORCH_CHECK_VALUE(!program.empty(), "which program? fsdp run --nproc-per-node N program arguments...");
  TORCH_CHECK_VALUE(arguments.num_nodes == "1" || arguments.num_nodes == "1:1", "--nnodes is \"", arguments.num_nodes,
                    "\", but this launcher starts one node");
  TORCH_CHECK_VALUE(arguments.shutdown_timeout >= 0, "--shutdown-timeout is ", arguments.shutdown_timeout,
                    ", but seconds >= 0 are needed");
  LaunchSpec spec;
  spec.num_workers = parse_num_workers(arguments.num_workers);
  spec.program = program;
  spec.program[0] = find_program_file(program[0]);
  spec.master_addr = arguments.master_addr;
  if (arguments.master_port != 0) spec.master_port = arguments.master_port;
  spec.run_id = make_run_id();
  spec.role = arguments.role;
  spec.grace = std::chrono::seconds(arguments.shutdown_timeout);
  spec.set_one_thread = spec.num_workers > 1 && std::getenv("OMP_NUM_THREADS") == nullptr;
  return spec;
}

int launch(const RunArguments& arguments, const std::vector<std::string>& program) {
  try {
    const auto spec = make_launch_spec(arguments, program);
    if (spec.set_one_thread) {
      std::cerr << "fsdp run: OMP_NUM_THREADS is not set: each of the " << spec.num_workers
                << " workers computes with 1 thread. Set it to use more." << std::endl;
    }
    return Supervisor(spec).run();
  } catch (const std::exception& error) {
    std::cerr << "fsdp run: error: " << comm::reason_of(error) << std::endl;
    return 2;
  }
}

}  // namespace

void add_run_command(CLI::App& app, const std::vector<std::string>& program, int& exit_code) {
  auto* command =
      app.add_subcommand("run", "Start a program as the ranks of a job: fsdp run OPTIONS PROGRAM ARGUMENTS");
  auto arguments = std::make_shared<RunArguments>();
  command->add_option("--nproc-per-node,--nproc_per_node", arguments->num_workers, "workers: a number, cpu or auto")
      ->envname("PET_NPROC_PER_NODE")
      ->capture_default_str();
  command->add_option("--nnodes", arguments->num_nodes, "nodes: only 1 so far")
      ->envname("PET_NNODES")
      ->capture_default_str();
  command->add_option("--master-addr,--master_addr", arguments->master_addr, "address that workers meet at")
      ->envname("PET_MASTER_ADDR")
      ->capture_default_str();
  command->add_option("--master-port,--master_port", arguments->master_port, "port that workers meet at; 0: a free one")
      ->envname("PET_MASTER_PORT")
      ->capture_default_str();
  command->add_option("--role", arguments->role, "name in the prefix of output lines")
      ->envname("PET_ROLE")
      ->capture_default_str();
  command
      ->add_option("--shutdown-timeout,--shutdown_timeout", arguments->shutdown_timeout,
                   "seconds that workers get to stop before they are killed")
      ->envname("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
      ->capture_default_str();
  command->add_flag("--standalone", arguments->standalone, "accepted; one node with a free port is the default anyway");
  command->callback([arguments, &program, &exit_code] { exit_code = launch(*arguments, program); });
}

}  // namespace fsdp::apps
