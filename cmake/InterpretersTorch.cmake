# For builds by pip: the PyTorch of the interpreter that pip runs in, or one message with the command that helps.
file(STRINGS ${PROJECT_SOURCE_DIR}/pyproject.toml pinned REGEX "^dependencies = .*torch==")
string(REGEX REPLACE ".*torch==([0-9]+\\.[0-9]+)\\.\\*.*" "\\1" pinned "${pinned}")
set(commands
  "  pip install scikit-build-core \"torch==${pinned}.*\"\n"
  "  pip install --no-build-isolation .")
execute_process(COMMAND ${Python_EXECUTABLE} -c "import torch, torch.utils; print(torch.__version__, torch.utils.cmake_prefix_path)"
  OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE torch_missing ERROR_QUIET)
if(torch_missing)
  message(FATAL_ERROR "cosformer: ${Python_EXECUTABLE} has no PyTorch here. cosformer is built against the PyTorch that it "
    "will run with; a build that pip isolates sees none. Run\n" ${commands})
endif()
string(REGEX MATCH "^([^ ]+) (.*)$" found "${found}")
set(torch_version ${CMAKE_MATCH_1})
list(APPEND CMAKE_PREFIX_PATH ${CMAKE_MATCH_2})
if(NOT torch_version MATCHES "^${pinned}\\.")
  message(FATAL_ERROR "cosformer: found PyTorch ${torch_version} in ${Python_EXECUTABLE}, expected ${pinned}. Run\n" ${commands})
endif()
