# `cmake --install`: headers, static libraries, the program, and a package that find_package(cosformer) finds.
#   find_package(cosformer REQUIRED)                    cosformer::base kernels text format
#   find_package(cosformer REQUIRED COMPONENTS torch)   also cosformer::ops nn models data train bench (finds Torch itself)
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/cosformer)
set(headers base kernels text format)
install(TARGETS cosformer_base cosformer_kernels cosformer_text cosformer_format cosformer_hwy cosformer_sentencepiece
  EXPORT cosformerTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT cosformerTargets NAMESPACE cosformer:: DESTINATION ${package_dir})
if(COSFORMER_TORCH)
  list(APPEND headers ops nn models data train bench)
  install(TARGETS cosformer_ops cosformer_nn cosformer_models cosformer_data cosformer_plot cosformer_train cosformer_bench cosformer_torch
    EXPORT cosformerTorchTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(EXPORT cosformerTorchTargets NAMESPACE cosformer:: DESTINATION ${package_dir})
endif()
foreach(header ${headers})
  install(FILES ${PROJECT_SOURCE_DIR}/include/cosformer/${header}.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/cosformer)
endforeach()
if(TARGET cosformer)
  if(COSFORMER_TORCH)  # the program finds the torch that it was built with
    set_target_properties(cosformer PROPERTIES INSTALL_RPATH "${TORCH_INSTALL_PREFIX}/lib")
  endif()
  install(TARGETS cosformer RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/cosformerConfig.cmake.in
  ${PROJECT_BINARY_DIR}/cosformerConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/cosformerConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/cosformerConfig.cmake ${PROJECT_BINARY_DIR}/cosformerConfigVersion.cmake
  DESTINATION ${package_dir})
