# Compiler settings shared by every target of this project; a project that adds this one keeps its own.
# No -march=native: processors differ between machines.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

set(FSDP_SANITIZE "" CACHE STRING "address, undefined or thread")
if(FSDP_SANITIZE)
  # Instrumented code confuses g++ 12's flow analysis: it takes variants for unset.
  add_compile_options(-fsanitize=${FSDP_SANITIZE} -fno-omit-frame-pointer -Wno-error=maybe-uninitialized)
  add_link_options(-fsanitize=${FSDP_SANITIZE})
  if(FSDP_SANITIZE STREQUAL "thread")
    add_compile_options(-Wno-tsan)  # LibTorch's headers use fences, which the sanitizer cannot follow
  endif()
endif()

if(NOT PROJECT_IS_TOP_LEVEL)
  return()
endif()

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
# -O3 gains nothing measurable over kernels that live in LibTorch, and costs compile time.
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -g1 -DNDEBUG" CACHE STRING "" FORCE)

find_program(FSDP_CCACHE ccache)
if(FSDP_CCACHE)
  # The precompiled header needs these two relaxations to be cached at all.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${FSDP_CCACHE})
endif()
find_program(FSDP_MOLD mold)
if(FSDP_MOLD)
  add_link_options(-fuse-ld=mold)
endif()
