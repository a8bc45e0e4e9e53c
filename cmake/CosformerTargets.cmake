# Helpers that keep every folder's CMakeLists.txt to a few lines.
include(GNUInstallDirs)

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

# ccache where it is installed: rebuilding another preset costs little, and with paths relative to the source so does
# another checkout (tests/install builds one).
find_program(COSFORMER_CCACHE ccache)
if(COSFORMER_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=time_macros,include_file_mtime,include_file_ctime
      CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} ${COSFORMER_CCACHE})
endif()

add_library(cosformer_options INTERFACE)
target_compile_features(cosformer_options INTERFACE cxx_std_20)
target_compile_options(cosformer_options INTERFACE -Wall -Wextra -Wpedantic -Wno-unknown-pragmas)
if(COSFORMER_WERROR)
  target_compile_options(cosformer_options INTERFACE -Werror)
endif()
if(COSFORMER_SANITIZE)
  add_compile_options(-fsanitize=${COSFORMER_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all -g1)
  add_link_options(-fsanitize=${COSFORMER_SANITIZE})
endif()

# cosformer_library(NAME [folder deps...] [PRIVATE private deps...]): all sources of this folder (and below) as libcosformer_NAME.
function(cosformer_library name)
  cmake_parse_arguments(arg "" "" "DEPS;PRIVATE" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cc)
  add_library(cosformer_${name} STATIC ${sources})
  add_library(cosformer::${name} ALIAS cosformer_${name})
  target_include_directories(cosformer_${name} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_include_directories(cosformer_${name} PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_compile_features(cosformer_${name} PUBLIC cxx_std_20)
  target_link_libraries(cosformer_${name} PUBLIC ${arg_DEPS} PRIVATE $<BUILD_INTERFACE:cosformer_options> ${arg_PRIVATE})
  set_target_properties(cosformer_${name} PROPERTIES EXPORT_NAME ${name} OUTPUT_NAME cosformer_${name})
endfunction()

# cosformer_unity(TARGET): its sources as one compilation. For targets of torch, whose headers take longer than our files.
function(cosformer_unity target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
endfunction()

# cosformer_test(FOLDER [SHARDS n] [ENVIRONMENT NAME=value...] [DEPS deps...]): every *.cc of this folder as one executable, and n ctest
# entries that share its tests out, so that a long folder uses more than one core.
function(cosformer_test name)
  cmake_parse_arguments(arg "" "SHARDS" "ENVIRONMENT;DEPS" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cc)
  if(NOT sources)
    return()
  endif()
  add_executable(${name}_test ${sources})
  target_include_directories(${name}_test PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name}_test PRIVATE ${arg_DEPS} cosformer_options GTest::gtest GTest::gtest_main)
  target_compile_definitions(${name}_test PRIVATE COSFORMER_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  if(NOT arg_SHARDS)
    set(arg_SHARDS 1)
  endif()
  foreach(shard RANGE 1 ${arg_SHARDS})
    set(entry ${name})
    if(arg_SHARDS GREATER 1)
      set(entry ${name}_${shard})
    endif()
    math(EXPR index "${shard} - 1")
    add_test(NAME ${entry} COMMAND ${name}_test)
    set(environment GTEST_TOTAL_SHARDS=${arg_SHARDS} GTEST_SHARD_INDEX=${index} ${arg_ENVIRONMENT})
    set_tests_properties(${entry} PROPERTIES LABELS ${name} TIMEOUT 3000 ENVIRONMENT "${environment}")
  endforeach()
endfunction()
