"""`cmake --install`, then two projects outside the tree that find and use the package."""

import shutil
import subprocess

from conftest import ROOT, run


def test_torch_free_consumer(build_consumer, tmp_path):
    source = shutil.copytree(ROOT / "tests/install/torch_free", tmp_path / "source")
    program = build_consumer(source)
    assert run(program).strip() == "3.000"
    libraries = run("ldd", program)
    assert "torch" not in libraries and "python" not in libraries


def test_torch_consumer(build_consumer, torch_dir, tmp_path):
    source = shutil.copytree(ROOT / "tests/install/torch", tmp_path / "source")
    program = build_consumer(source, f"-DTorch_DIR={torch_dir}")
    assert run(program).strip().splitlines()[-1] == "2 7 11"


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
