# find_package(fsdp), from the install tree and from this build tree.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fsdp)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/fsdpConfig.cmake.in ${PROJECT_BINARY_DIR}/fsdpConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fsdpConfigVersion.cmake COMPATIBILITY SameMinorVersion)
file(COPY ${PROJECT_SOURCE_DIR}/cmake/FsdpTorchGuard.cmake DESTINATION ${PROJECT_BINARY_DIR})

install(TARGETS fsdp EXPORT fsdpTargets COMPONENT fsdp FILE_SET HEADERS COMPONENT fsdp)
install(FILES ${PROJECT_BINARY_DIR}/fsdpConfig.cmake ${PROJECT_BINARY_DIR}/fsdpConfigVersion.cmake
              ${PROJECT_SOURCE_DIR}/cmake/FsdpTorchGuard.cmake
        DESTINATION ${package_dir} COMPONENT fsdp)
install(EXPORT fsdpTargets NAMESPACE fsdp:: DESTINATION ${package_dir} COMPONENT fsdp)
export(EXPORT fsdpTargets NAMESPACE fsdp:: FILE ${PROJECT_BINARY_DIR}/fsdpTargets.cmake)
