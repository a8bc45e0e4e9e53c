"""The pages' C++ examples build against the installed package and print what the page says."""

import re

import pytest
from conftest import ROOT, run

EXAMPLE = re.compile(r"^```cpp\n(.*?)^```\n\n```text\n(.*?)^```", re.M | re.S)
PAGES = {
    page.stem: found
    for page in sorted((ROOT / "docs").rglob("*.md"))
    for found in EXAMPLE.findall(page.read_text())
}
KINDS = {"softmax", "linear", "cosformer", "performer", "linformer", "longformer", "bigbird"}

PROJECT = """cmake_minimum_required(VERSION 3.25)
project(docs LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 20)
find_package(cosformer REQUIRED COMPONENTS torch)
file(WRITE ${CMAKE_BINARY_DIR}/empty.cc "")
add_library(precompiled OBJECT ${CMAKE_BINARY_DIR}/empty.cc)
target_link_libraries(precompiled PRIVATE cosformer::nn)
target_precompile_headers(precompiled PRIVATE <torch/torch.h>)
foreach(page %s)
  add_executable(${page} ${page}.cc)
  target_link_libraries(${page} PRIVATE cosformer::nn)
  target_precompile_headers(${page} REUSE_FROM precompiled)
endforeach()
"""


@pytest.fixture(scope="module")
def programs(prefix, torch_dir, tmp_path_factory):
    source = tmp_path_factory.mktemp("docs")
    for page, (program, _) in PAGES.items():
        (source / f"{page}.cc").write_text(program)
    (source / "CMakeLists.txt").write_text(PROJECT % " ".join(PAGES))
    options = [f"-DCMAKE_PREFIX_PATH={prefix}", f"-DTorch_DIR={torch_dir}"]
    run("cmake", "-G", "Ninja", "-S", source, "-B", source / "build", *options)
    run("cmake", "--build", source / "build")
    return source / "build"


def test_every_kind_has_an_example():
    assert set(PAGES) >= KINDS


@pytest.mark.parametrize("page", PAGES)
def test_example(programs, page):
    assert run(programs / page) == PAGES[page][1]


def test_every_example_has_its_output():
    """A cpp block without the text that it prints would be left out above."""
    for page in (ROOT / "docs").rglob("*.md"):
        blocks = re.findall(r"^```cpp\n", page.read_text(), re.M)
        assert len(blocks) == (page.stem in PAGES), page
