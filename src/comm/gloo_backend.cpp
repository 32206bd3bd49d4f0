// The one file that needs gloo's own headers; kept out of the unity build because they define what others declare.
#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif
#include "comm/gloo_backend.h"

#include <csignal>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupWrapper.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/environment.h"
#include "comm/local_address.h"
#include "comm/log.h"

namespace fsdp::comm {
namespace {

using GlooDevice = std::shared_ptr<::gloo::transport::Device>;

const c10d::TCPStore* underlying_tcp_store(const c10::intrusive_ptr<c10d::Store>& store) {
  if (auto* prefix = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    return dynamic_cast<const c10d::TCPStore*>(prefix->getUnderlyingNonPrefixStore().get());
  }
  return dynamic_cast<const c10d::TCPStore*>(store.get());
}

GlooDevice device_of_interface(const std::string& name) {
  TORCH_CHECK_VALUE(has_interface(name), "GLOO_SOCKET_IFNAME is \"", name,
                    "\", but no network interface has that name: one interface name is needed (such as eth0 or lo), "
                    "not a list or a pattern");
  return c10d::ProcessGroupGloo::createDeviceForInterface(name);
}

GlooDevice choose_device(const c10::intrusive_ptr<c10d::Store>& store) {
  if (const auto interface = read_variable("GLOO_SOCKET_IFNAME")) return device_of_interface(*interface);
  const auto* tcp_store = underlying_tcp_store(store);
  if (tcp_store == nullptr) {
    // Ranks that share a HashStore are threads of this process; other stores do not tell where their ranks are.
    return spans_hosts() ? c10d::ProcessGroupGloo::createDefaultDevice()
                         : c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1");
  }
  const auto address = address_towards(tcp_store->getHost(), tcp_store->getPort());
  if (!address) return c10d::ProcessGroupGloo::createDefaultDevice();
  TORCH_CHECK_VALUE(!(is_loopback(*address) && spans_hosts()), "MASTER_ADDR is \"", tcp_store->getHost(),
                    "\", which leads to the loopback address ", *address,
                    " on this host, but the job spans several hosts: set MASTER_ADDR to an address that all hosts can "
                    "reach, or GLOO_SOCKET_IFNAME to the name of one network interface");
  return c10d::ProcessGroupGloo::createDeviceForHostname(*address);
}

c10::intrusive_ptr<c10d::Backend> connect(const BackendContext& context, const c10::intrusive_ptr<c10d::Store>& store) {
  auto options = c10d::ProcessGroupGloo::Options::create(context.timeout);
  options->devices.push_back(choose_device(context.store));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, context.rank, context.size, options);
}

// gloo writes to sockets in a way that raises SIGPIPE when a peer is gone, which by default ends the process before
// anybody can say so. A program's own handler stays.
void ignore_broken_pipes() {
  struct sigaction now {};
  if (sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) std::ignore = signal(SIGPIPE, SIG_IGN);
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const BackendContext& context) {
  ignore_broken_pipes();
  auto backend = connect(context, context.store);
  if (!checks_every_collective()) return backend;
  // LibTorch's wrapper compares kinds, shapes and dtypes through a second backend before each collective.
  const auto checker = connect(context, c10::make_intrusive<c10d::PrefixStore>("fsdp/check", context.store));
  return c10::make_intrusive<c10d::ProcessGroupWrapper>(backend, checker);
}

}  // namespace fsdp::comm
