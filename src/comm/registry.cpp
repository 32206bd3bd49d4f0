#include "comm/registry.h"

#include <c10/util/StringUtil.h>

#include "comm/gloo_backend.h"
#include "comm/immortal.h"

namespace fsdp::comm {
namespace {

struct BackendTable {
  std::mutex mutex;
  std::map<std::string, BackendSpec> specs{{"gloo", {"gloo", {c10::kCPU}, make_gloo_backend}}};
};

BackendTable& backend_table() {
  static Immortal<BackendTable> table;
  return table.get();
}

}  // namespace

BackendSpec find_backend(const std::string& name) {
  auto& table = backend_table();
  const std::lock_guard lock(table.mutex);
  const auto found = table.specs.find(name);
  if (found != table.specs.end()) return found->second;
  std::vector<std::string> known;
  for (const auto& [known_name, spec] : table.specs) known.push_back(known_name);
  TORCH_CHECK_VALUE(false, "no backend is registered as \"", name, "\"; known: ", c10::Join(", ", known),
                    ". Add others with fsdp::register_backend");
}

}  // namespace fsdp::comm

namespace fsdp {

void register_backend(const std::string& name, std::vector<c10::DeviceType> device_types, BackendFactory factory) {
  TORCH_CHECK_VALUE(!name.empty(), "register_backend: the name is empty");
  TORCH_CHECK_VALUE(!device_types.empty(), "register_backend(\"", name, "\"): at least one device type is needed");
  TORCH_CHECK_VALUE(factory != nullptr, "register_backend(\"", name, "\"): the factory is empty");
  auto& table = comm::backend_table();
  const std::lock_guard lock(table.mutex);
  const bool added =
      table.specs.emplace(name, comm::BackendSpec{name, std::move(device_types), std::move(factory)}).second;
  TORCH_CHECK_VALUE(added, "register_backend: the name \"", name, "\" is taken");
}

}  // namespace fsdp
