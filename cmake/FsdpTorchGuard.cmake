# Which LibTorch and which C++ ABI this library works with. Installed beside fsdpConfig.cmake, so that a project that
# uses the library is told the same in the same words. Each function sets <out> to one line, or to "" when all is well.
set(FSDP_TORCH_VERSION 2.13)

# After find_package(Torch QUIET).
function(fsdp_torch_problem out)
  set(problem "")
  set(hint "Run ./dev setup, or name a LibTorch ${FSDP_TORCH_VERSION} with FSDP_LIBTORCH or CMAKE_PREFIX_PATH.")
  if(NOT Torch_FOUND)
    set(problem "fsdp: LibTorch ${FSDP_TORCH_VERSION} is needed and none was found. ${hint}")
  elseif(NOT Torch_VERSION MATCHES "^([0-9]+\\.[0-9]+)" OR NOT CMAKE_MATCH_1 VERSION_EQUAL FSDP_TORCH_VERSION)
    string(CONCAT problem "fsdp: LibTorch ${FSDP_TORCH_VERSION} is supported, but LibTorch ${Torch_VERSION} was found in "
                          "${Torch_DIR}. ${hint}")
  endif()
  set(${out} "${problem}" PARENT_SCOPE)
endfunction()

# std::string differs between the two C++ ABIs of libstdc++, so every object must use the one of LibTorch.
function(fsdp_cxx_abi_problem out)
  set(problem "")
  get_directory_property(definitions COMPILE_DEFINITIONS)
  get_directory_property(options COMPILE_OPTIONS)
  set(old_abi "_GLIBCXX_USE_CXX11_ABI=0")
  if("${TORCH_CXX_FLAGS}" MATCHES "${old_abi}")
    string(CONCAT problem "fsdp: the LibTorch in ${Torch_DIR} was built with the old C++ ABI (${old_abi}); use a build with "
                          "the new one, as pip installs.")
  elseif("${CMAKE_CXX_FLAGS} ${definitions} ${options} $ENV{CXXFLAGS}" MATCHES "${old_abi}")
    string(CONCAT problem "fsdp: this project asks for the old C++ ABI (${old_abi}), but LibTorch and fsdp use the new one; "
                          "remove that definition.")
  endif()
  set(${out} "${problem}" PARENT_SCOPE)
endfunction()
