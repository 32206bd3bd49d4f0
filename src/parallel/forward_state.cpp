#include "parallel/forward_state.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

namespace fsdp::parallel {

namespace {

std::vector<GeneratorState> read_generators(const std::vector<c10::Device>& devices) {
  std::vector<GeneratorState> states;
  for (const auto device : devices) {
    auto generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    states.push_back({generator, generator.get_state()});
  }
  return states;
}

std::vector<GeneratorState> read_again(const std::vector<GeneratorState>& states) {
  std::vector<c10::Device> devices;
  for (const auto& [generator, state] : states) devices.push_back(generator.device());
  return read_generators(devices);
}

void write_generators(const std::vector<GeneratorState>& states) {
  for (auto [generator, state] : states) {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
}

std::vector<at::ScalarType> read_autocast_dtypes() {
  std::vector<at::ScalarType> dtypes;
  for (const auto device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    dtypes.push_back(at::autocast::get_autocast_dtype(device));
  }
  return dtypes;
}

void write_autocast_dtypes(const std::vector<at::ScalarType>& dtypes) {
  for (size_t i = 0; i < dtypes.size(); ++i) {
    at::autocast::set_autocast_dtype(at::autocast::_AUTOCAST_SUPPORTED_DEVICES[i], dtypes[i]);
  }
}

bool is_autocast_enabled() {
  const auto& devices = at::autocast::_AUTOCAST_SUPPORTED_DEVICES;
  return std::any_of(devices.begin(), devices.end(),
                     [](c10::DeviceType device) { return at::autocast::is_autocast_enabled(device); });
}

std::vector<c10::Device> with_cpu(const std::vector<c10::Device>& devices) {
  std::vector<c10::Device> result{c10::Device(c10::kCPU)};
  for (const auto device : devices) {
    if (device.is_meta() || std::find(result.begin(), result.end(), device) != result.end()) continue;
    result.push_back(device);
  }
  return result;
}

}  // namespace

ForwardState::ForwardState(bool with_random_state, const std::vector<c10::Device>& devices)
    : keys_(c10::impl::tls_local_dispatch_key_set()),
      scopes_(c10::ThreadLocalDebugInfo::current()),
      autograd_(c10::AutogradState::get_tls_state()),
      autocast_dtypes_(read_autocast_dtypes()) {
  if (with_random_state) generators_ = read_generators(with_cpu(devices));
}

ForwardState::Replay::Replay(const ForwardState& state)
    : generators_(read_again(state.generators_)),
      keys_(state.keys_),
      scopes_(c10::ThreadLocalDebugInfo::current()),
      autograd_(c10::AutogradState::get_tls_state()),
      autocast_dtypes_(read_autocast_dtypes()) {
  c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(state.scopes_);
  c10::AutogradState::set_tls_state(state.autograd_);
  write_autocast_dtypes(state.autocast_dtypes_);
  write_generators(state.generators_);
}

ForwardState::Replay::~Replay() {
  if (is_autocast_enabled()) at::autocast::clear_cache();  // casts of weights that only the second run needed
  write_generators(generators_);
  write_autocast_dtypes(autocast_dtypes_);
  c10::AutogradState::set_tls_state(autograd_);
  c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(scopes_);
}

}  // namespace fsdp::parallel
