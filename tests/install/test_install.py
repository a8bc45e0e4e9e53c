"""`cmake --install`, then two projects outside the tree that find and use the package."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("COSFORMER_BUILD", ROOT / "build" / "release"))


def run(*command, **kwargs):
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **kwargs,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    assert (BUILD / "CMakeCache.txt").exists(), f"no build in {BUILD}: run `make build`"
    where = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", BUILD, "--prefix", where)
    return where


def build_and_run(source, prefix, tmp_path, *options):
    shutil.copytree(source, tmp_path / "source")
    binary = tmp_path / "build"
    found_by = f"-DCMAKE_PREFIX_PATH={prefix}"
    run("cmake", "-G", "Ninja", "-S", tmp_path / "source", "-B", binary, found_by, *options)
    run("cmake", "--build", binary)
    return run(binary / "consumer")


def test_torch_free_consumer(prefix, tmp_path):
    assert build_and_run(ROOT / "tests/install/torch_free", prefix, tmp_path).strip() == "3.000"
    libraries = run("ldd", tmp_path / "build" / "consumer")
    assert "torch" not in libraries and "python" not in libraries


def test_torch_consumer(prefix, tmp_path):
    torch_dir = run(
        sys.executable, "-c", "import torch; print(torch.utils.cmake_prefix_path)"
    ).strip()
    out = build_and_run(
        ROOT / "tests/install/torch", prefix, tmp_path, f"-DTorch_DIR={torch_dir}/Torch"
    )
    assert out.strip().splitlines()[-1] == "2 7 11"


def test_installed_program_runs(prefix):
    assert "cosformer" in run(prefix / "bin" / "cosformer", "--version")


def test_unknown_component_is_refused(prefix, tmp_path):
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(c LANGUAGES CXX)\n"
        "find_package(cosformer REQUIRED COMPONENTS cuda)\n"
    )
    done = subprocess.run(
        ["cmake", "-S", tmp_path, "-B", tmp_path / "b", f"-DCMAKE_PREFIX_PATH={prefix}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and "found component 'cuda'" in done.stderr
