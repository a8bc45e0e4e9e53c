# Each library that we lean on, and why it.

# cosformer_missing(WHAT PACKAGE): the one message for a library that is not there.
function(cosformer_missing what package)
  message(FATAL_ERROR "cosformer: ${what} was not found. On Debian and Ubuntu, install it (as root) with\n"
    "  apt-get install ${package}")
endfunction()

# Highway: one SIMD source for every instruction set, run-time dispatch, maintained by Google.
find_library(HWY_LIBRARY hwy)
find_path(HWY_INCLUDE_DIR hwy/highway.h)
if(NOT HWY_LIBRARY OR NOT HWY_INCLUDE_DIR)
  cosformer_missing("Highway (hwy/highway.h, libhwy)" "libhwy-dev nlohmann-json3-dev")
endif()
add_library(cosformer_hwy INTERFACE)
target_link_libraries(cosformer_hwy INTERFACE $<BUILD_INTERFACE:${HWY_LIBRARY}> $<INSTALL_INTERFACE:hwy>)
target_include_directories(cosformer_hwy SYSTEM INTERFACE $<BUILD_INTERFACE:${HWY_INCLUDE_DIR}>)

# nlohmann-json: the most used JSON library of C++; exact integers, errors with positions.
find_package(nlohmann_json 3.11 QUIET CONFIG)
if(NOT nlohmann_json_FOUND)
  cosformer_missing("nlohmann-json 3.11" nlohmann-json3-dev)
endif()

if(NOT COSFORMER_EXTENSION_ONLY)
  # sentencepiece: trains and runs BPE with byte fallback; its model files are read everywhere.
  find_library(SENTENCEPIECE_LIBRARY sentencepiece REQUIRED)
  find_library(SENTENCEPIECE_TRAIN_LIBRARY sentencepiece_train REQUIRED)
  find_path(SENTENCEPIECE_INCLUDE_DIR sentencepiece_processor.h REQUIRED)
  add_library(cosformer_sentencepiece INTERFACE)
  target_link_libraries(cosformer_sentencepiece INTERFACE
    $<BUILD_INTERFACE:${SENTENCEPIECE_TRAIN_LIBRARY}> $<BUILD_INTERFACE:${SENTENCEPIECE_LIBRARY}>
    $<INSTALL_INTERFACE:sentencepiece_train> $<INSTALL_INTERFACE:sentencepiece>)
  target_include_directories(cosformer_sentencepiece SYSTEM INTERFACE $<BUILD_INTERFACE:${SENTENCEPIECE_INCLUDE_DIR}>)

  # CLI11: subcommands, validation and --help without code of our own.
  find_package(CLI11 2.1 REQUIRED CONFIG)
endif()

if(COSFORMER_TORCH)
  if(NOT COSFORMER_EXTENSION_ONLY)
    # toml++: TOML 1.0 with line numbers in errors.
    find_package(tomlplusplus 3.3 REQUIRED CONFIG)
  endif()
  # LibTorch from the PyTorch wheel of the chosen interpreter: one torch for C++ and Python.
  if(SKBUILD)  # pip builds: the interpreter is the one that pip runs in
    include(InterpretersTorch)
  else()
    if(NOT Torch_DIR)
      find_program(COSFORMER_PYTHON NAMES python3 HINTS ${PROJECT_SOURCE_DIR}/build/venv/bin NO_DEFAULT_PATH)
      find_program(COSFORMER_PYTHON NAMES python3)
      execute_process(COMMAND ${COSFORMER_PYTHON} -c "import torch.utils as u, torch; print(torch.utils.cmake_prefix_path)"
        OUTPUT_VARIABLE torch_prefix OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE torch_missing ERROR_QUIET)
      if(torch_missing)
        set(found ${COSFORMER_PYTHON})
        unset(COSFORMER_PYTHON CACHE)  # look again once torch is installed
        message(FATAL_ERROR "No PyTorch in ${found}. Run `tools/setup.sh` (or `pip install torch==2.13.0`), "
          "or configure the torch-free part alone with -DCOSFORMER_TORCH=OFF.")
      endif()
      list(APPEND CMAKE_PREFIX_PATH ${torch_prefix})
    endif()
    find_package(Torch REQUIRED CONFIG)
  endif()
  add_library(cosformer_torch INTERFACE)
  target_include_directories(cosformer_torch SYSTEM INTERFACE "$<BUILD_INTERFACE:${TORCH_INCLUDE_DIRS}>")
  target_link_libraries(cosformer_torch INTERFACE "$<BUILD_INTERFACE:${TORCH_LIBRARIES}>" $<INSTALL_INTERFACE:torch>)
  separate_arguments(torch_flags UNIX_COMMAND "${TORCH_CXX_FLAGS}")
  target_compile_options(cosformer_torch INTERFACE ${torch_flags})
endif()

if(COSFORMER_TESTS AND NOT COSFORMER_EXTENSION_ONLY)
  # GoogleTest: the usual test framework of C++.
  find_package(GTest 1.12 REQUIRED CONFIG)
endif()
if(COSFORMER_BENCHMARKS AND NOT COSFORMER_EXTENSION_ONLY)
  # google-benchmark: warm-up, repetitions and statistics for kernels.
  find_package(benchmark 1.7 REQUIRED CONFIG)
endif()
