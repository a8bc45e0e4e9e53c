# For builds by pip: the PyTorch of the interpreter that pip runs in, or one message with the command that helps.
file(STRINGS ${PROJECT_SOURCE_DIR}/pyproject.toml pinned REGEX "^dependencies = .*torch==")
string(REGEX REPLACE ".*torch==([0-9]+\\.[0-9]+)\\.\\*.*" "\\1" pinned "${pinned}")
set(commands
  "  pip install scikit-build-core \"torch==${pinned}.*\"\n"
  "  pip install --no-build-isolation .")
set(ask "import torch, torch.utils as u"
  "v = torch.version"
  "print(torch.__version__, u.cmake_prefix_path, v.cuda or v.hip or 'cpu', int(torch.compiled_with_cxx11_abi()), sep=chr(10))")
execute_process(COMMAND ${Python_EXECUTABLE} -c "${ask}"
  OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE torch_missing ERROR_QUIET)
if(torch_missing)
  message(FATAL_ERROR "cosformer: ${Python_EXECUTABLE} has no PyTorch here. cosformer is built against the PyTorch that it "
    "will run with; a build that pip isolates sees none. Run\n" ${commands})
endif()
string(REPLACE "\n" ";" found "${found}")
list(GET found 0 torch_version)
list(GET found 1 torch_prefix)
list(GET found 2 torch_device)
list(GET found 3 torch_abi)
if(NOT torch_version MATCHES "^${pinned}\\.")
  message(FATAL_ERROR "cosformer: found PyTorch ${torch_version} in ${Python_EXECUTABLE}, expected ${pinned}. Run\n" ${commands})
endif()
if(torch_device STREQUAL cpu AND NOT COSFORMER_TORCH_AS_FILES)
  list(APPEND CMAKE_PREFIX_PATH ${torch_prefix})
  find_package(Torch REQUIRED CONFIG)
else()
  # A GPU build's CMake package wants the GPU's compiler, which nothing here is compiled by: its headers and libraries as they are.
  string(REGEX REPLACE "[+].*" "" Torch_VERSION ${torch_version})
  get_filename_component(TORCH_INSTALL_PREFIX ${torch_prefix}/../.. ABSOLUTE)
  set(TORCH_INCLUDE_DIRS ${TORCH_INSTALL_PREFIX}/include ${TORCH_INSTALL_PREFIX}/include/torch/csrc/api/include)
  set(TORCH_CXX_FLAGS "-D_GLIBCXX_USE_CXX11_ABI=${torch_abi}")
  foreach(name torch torch_cpu c10)
    list(APPEND TORCH_LIBRARIES ${TORCH_INSTALL_PREFIX}/lib/lib${name}.so)
  endforeach()
endif()
