import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("COSFORMER_BUILD", ROOT / "build" / "release"))


def run(*command, **kwargs):
    """Runs a command that must succeed; returns what it printed."""
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **kwargs,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="session")
def prefix(tmp_path_factory):
    """A folder with the installed package."""
    assert (BUILD / "CMakeCache.txt").exists(), f"no build in {BUILD}: run `make build`"
    where = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", BUILD, "--prefix", where)
    return where


@pytest.fixture(scope="session")
def torch_dir():
    print_path = "import torch; print(torch.utils.cmake_prefix_path)"
    return run(sys.executable, "-c", print_path).strip() + "/Torch"


@pytest.fixture
def build_consumer(prefix, tmp_path):
    """Builds a project outside the tree against the package; returns its program."""

    def build(source, *options):
        binary = tmp_path / "build"
        found_by = f"-DCMAKE_PREFIX_PATH={prefix}"
        run("cmake", "-G", "Ninja", "-S", source, "-B", binary, found_by, *options)
        run("cmake", "--build", binary)
        return binary / "consumer"

    return build
