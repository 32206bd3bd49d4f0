#pragma once
// The version of this library, and the two things that must be the same in it, in LibTorch and in your program.
// Every public header includes this one, so a wrong setting is told once, in words, and not by the linker.
#include <torch/headeronly/version.h>

#include <string>  // defines _GLIBCXX_USE_CXX11_ABI

#define FSDP_VERSION_MAJOR 0
#define FSDP_VERSION_MINOR 1
#define FSDP_VERSION_PATCH 0

#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR != 13
#error "fsdp: LibTorch 2.13 is supported, but the headers of another LibTorch come first in the include path"
#endif
#if defined(_GLIBCXX_USE_CXX11_ABI) && !_GLIBCXX_USE_CXX11_ABI
#error "fsdp: compiled with the old C++ ABI (_GLIBCXX_USE_CXX11_ABI=0), but LibTorch and fsdp use the new one"
#endif
