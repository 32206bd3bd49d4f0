#pragma once
// Every translation unit of the project starts from this, precompiled.
#include <torch/csrc/autograd/engine.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <unordered_map>
#include <vector>
