#pragma once
// Everything: FSDP2 for C++.
#include <fsdp/activation_checkpoint.h>
#include <fsdp/call.h>
#include <fsdp/checkpoint_arguments.h>
#include <fsdp/checkpoint_wrapper.h>
#include <fsdp/device_mesh.h>
#include <fsdp/dtensor.h>
#include <fsdp/fsdp_module.h>
#include <fsdp/fully_shard.h>
#include <fsdp/memory_stats.h>
#include <fsdp/optimizer_state_dict.h>
#include <fsdp/placement.h>
#include <fsdp/policies.h>
#include <fsdp/process_group.h>
#include <fsdp/saved_tensor_hooks.h>
#include <fsdp/state_dict.h>
#include <fsdp/version.h>
