"""`python -m cosformer.info` reports, above all where the package does not import."""

import json
import os
import subprocess
import sys

import cosformer
import torch
from cosformer import _library
from cosformer.info import lines
from helpers import PYTHON
from test_import import copied_library, copied_package


def info(*arguments, path=PYTHON, **environment):
    """(exit status, stdout) of the program in a new process; it writes nothing to stderr."""
    unset = {key: value for key, value in os.environ.items() if key != "COSFORMER_LIBRARY"}
    if path == PYTHON:
        unset["COSFORMER_LIBRARY"] = str(_library.find_library())
    done = subprocess.run(
        [sys.executable, "-m", "cosformer.info", *arguments],
        env={**unset, "PYTHONPATH": str(path), **environment},
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_report():
    status, out = info(OMP_NUM_THREADS="1")
    said = dict(line.split(":", 1) for line in out.splitlines())
    said = {key: value.strip() for key, value in said.items()}
    assert status == 0
    assert said["cosformer"] == cosformer.__version__
    assert said["library"] == str(_library.find_library())
    assert said["torch"].startswith(f"{torch.__version__}, built for 2.")
    assert said["instruction set"].split()[0] == cosformer.isa()
    assert said["threads"].split()[0] == "1"
    assert said["on cpu"].startswith("kernels: float32, float64, bfloat16, float16")
    assert said["on other devices"].startswith("portable")


def test_json():
    status, out = info("--json", COSFORMER_ISA="generic")
    found = json.loads(out)
    assert status == 0 and found["error"] is None
    assert found["version"] == cosformer.__version__
    assert found["isa"] == found["isa_forced"] == "generic"
    assert found["torch"] == torch.__version__ and found["threads"] >= 1
    assert set(found["runs"]) == {"cpu", "other devices", "second derivatives"}
    assert any("generic (forced by COSFORMER_ISA=generic)" in line for line in lines(found))


def test_forced_instruction_set():
    status, out = info(COSFORMER_ISA="sse9")
    assert status == 1
    assert "error: cosformer: COSFORMER_ISA is 'sse9', expected amx, avx512, avx2 or generic" in out


def test_without_the_library(tmp_path):
    package = copied_package(tmp_path)
    status, out = info("--json", path=package)
    found = json.loads(out)
    assert status == 1 and found["torch"] == torch.__version__ and found["isa"] is None
    assert "its operator library" in found["error"] and "`make build`" in found["error"]


def test_with_another_torch_or_none(tmp_path):
    package = copied_package(tmp_path)
    library = copied_library(package / "cosformer", torch_version="2.1.0")
    status, out = info(path=package)
    assert status == 1
    assert str(library) in out and f"{torch.__version__}, built for 2.1.0" in out
    assert 'pip install "torch==2.1.*"' in out
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch')")
    status, out = info(path=f"{tmp_path}{os.pathsep}{package}")
    assert status == 1 and "error: cosformer needs PyTorch" in out


def test_other_modules_of_a_broken_package_raise(tmp_path):
    """Only the report itself ends the process."""
    package = copied_package(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", "import cosformer", "cosformer.info"],
        env={"PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
    )
    assert "ImportError: cosformer: its operator library" in done.stderr and done.stdout == ""
