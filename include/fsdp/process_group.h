#pragma once
// Process groups from the environment a launcher sets, and a registry of backends by name.
//
//   fsdp::init_process_group();                      // RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
//   auto group = fsdp::default_group();
//   ...
//   fsdp::destroy_process_group();
//
// PyTorch: torch.distributed.init_process_group and neighbours.
#include <c10/core/DeviceType.h>
#include <fsdp/version.h>

#include <chrono>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace fsdp {

using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;

struct ProcessGroupOptions {
  std::string backend = "gloo";                                  // a name known to register_backend
  std::chrono::milliseconds timeout = std::chrono::minutes(10);  // of every collective and store wait
};

// Everything a backend needs to start on one rank of one group.
struct BackendContext {
  c10::intrusive_ptr<c10d::Store> store;  // private to the group
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{};
};
using BackendFactory = std::function<c10::intrusive_ptr<c10d::Backend>(const BackendContext&)>;

// Makes `name` usable in ProcessGroupOptions::backend for tensors on `device_types`.
// Errors: c10::ValueError when the name is taken.
void register_backend(const std::string& name, std::vector<c10::DeviceType> device_types, BackendFactory factory);

// Joins the default group described by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and
// TORCHELASTIC_USE_AGENT_STORE. Errors: c10::ValueError naming the variable that is missing, malformed or
// contradictory, or listing the known backends; c10::DistError naming the port that is in use or the ranks that do not
// come in time; c10::Error when there is a default group already.
void init_process_group(const ProcessGroupOptions& options = {});
// Drops the default group; init_process_group works again. Not needed before exit. Errors: c10::Error without group.
void destroy_process_group();
[[nodiscard]] bool is_initialized();

// Of the default group. Errors: c10::Error before init_process_group.
[[nodiscard]] int rank();
[[nodiscard]] int world_size();
[[nodiscard]] int local_rank();  // LOCAL_RANK, or rank() when unset
[[nodiscard]] ProcessGroup default_group();

// A group of some ranks of the default group, numbered from 0 in ascending order; every rank calls it, with the same
// list. Returns null on ranks outside. Errors: c10::ValueError for a list that is empty, names a rank twice or one that
// does not exist, or differs from another rank's; c10::DistError when members do not come in time; c10::Error before
// init.
[[nodiscard]] ProcessGroup new_group(const std::vector<int>& ranks, const std::string& description = "");

// A group over an explicit store, without touching the default one (ranks as threads of one process use it). Make one
// group a store, or put a c10d::PrefixStore in between. Errors: c10::ValueError for a null store or a rank outside 0 ..
// size - 1; c10::DistError when peers do not come in time. PyTorch: init_process_group(store=..., rank=...,
// world_size=...).
[[nodiscard]] ProcessGroup make_process_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                              const ProcessGroupOptions& options = {});

// The timeout a group was made with; 10 minutes for a group made elsewhere.
[[nodiscard]] std::chrono::milliseconds group_timeout(const ProcessGroup& group);

}  // namespace fsdp
