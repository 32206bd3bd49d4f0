# Declarative helpers: a layer, the library made of all layers, a program, a test.
find_package(Threads REQUIRED)

# Every translation unit starts from one precompiled torch header.
add_library(fsdp_pch OBJECT ${PROJECT_SOURCE_DIR}/cmake/pch.cpp)
target_link_libraries(fsdp_pch PUBLIC torch Threads::Threads)
target_include_directories(fsdp_pch SYSTEM PUBLIC ${TORCH_INCLUDE_DIRS})
target_precompile_headers(fsdp_pch PRIVATE ${PROJECT_SOURCE_DIR}/cmake/pch.h)

function(fsdp_compile_settings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra $<$<BOOL:${FSDP_WERROR}>:-Werror>)
  target_precompile_headers(${target} REUSE_FROM fsdp_pch)
  # Programs too are compiled with -fPIC, not -fPIE: the precompiled header is shared and fits one of the two only.
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(${target} PRIVATE -fPIC)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${FSDP_UNITY_BUILD} UNITY_BUILD_BATCH_SIZE 0)
endfunction()

# fsdp_layer(NAME [DEPENDS layer...]): src/NAME/*.cpp as one unity translation unit.
function(fsdp_layer name)
  cmake_parse_arguments(ARG "" "" "DEPENDS" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/${name}/*.cpp)
  add_library(fsdp_${name} OBJECT ${sources})
  target_link_libraries(fsdp_${name} PUBLIC torch Threads::Threads)
  target_include_directories(fsdp_${name} PUBLIC ${PROJECT_SOURCE_DIR}/include PRIVATE ${PROJECT_SOURCE_DIR}/src)
  fsdp_compile_settings(fsdp_${name})
  # gloo's own headers clash with what the other files of the layer include.
  set_source_files_properties(${PROJECT_SOURCE_DIR}/src/comm/gloo_backend.cpp PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  set_property(GLOBAL APPEND PROPERTY FSDP_LAYERS fsdp_${name})
endfunction()

function(fsdp_library)
  get_property(layers GLOBAL PROPERTY FSDP_LAYERS)
  set(objects)
  foreach(layer ${layers})
    list(APPEND objects $<TARGET_OBJECTS:${layer}>)
  endforeach()
  add_library(fsdp ${objects})
  add_library(fsdp::fsdp ALIAS fsdp)
  set_target_properties(fsdp PROPERTIES LINKER_LANGUAGE CXX)
  target_link_libraries(fsdp PUBLIC torch Threads::Threads)
  target_compile_features(fsdp PUBLIC cxx_std_20)
  file(GLOB headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/include/fsdp/*.h)
  target_sources(fsdp PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR}/include FILES ${headers})
endfunction()

# fsdp_program(NAME source...): a program on top of the library.
function(fsdp_program name)
  add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE fsdp)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src)
  fsdp_compile_settings(${name})
endfunction()
