# Finds LibTorch: FSDP_LIBTORCH (variable or environment), CMAKE_PREFIX_PATH, then the .venv that ./dev setup makes.
include(FsdpTorchGuard)

if(NOT FSDP_LIBTORCH AND DEFINED ENV{FSDP_LIBTORCH})
  set(FSDP_LIBTORCH $ENV{FSDP_LIBTORCH})
endif()
if(FSDP_LIBTORCH)
  list(PREPEND CMAKE_PREFIX_PATH ${FSDP_LIBTORCH})
endif()
file(GLOB fsdp_venv_torch ${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch)

# GLOBAL: a project that adds this one links fsdp::fsdp, so it must see `torch` too.
find_package(Torch QUIET GLOBAL HINTS ${fsdp_venv_torch})
fsdp_torch_problem(problem)
if(NOT problem)
  fsdp_cxx_abi_problem(problem)
endif()
if(problem)
  message(FATAL_ERROR "${problem}")
endif()
message(STATUS "LibTorch ${Torch_VERSION} in ${TORCH_INSTALL_PREFIX}")

# LibTorch contains gloo and not its headers.
find_path(FSDP_GLOO_INCLUDE_DIR gloo/algorithm.h)
if(NOT FSDP_GLOO_INCLUDE_DIR)
  message(FATAL_ERROR "fsdp: the headers of gloo are needed to build (Debian package libgloo-dev)")
endif()
