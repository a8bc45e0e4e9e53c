"""Importing the package where something is missing gives one plain message (behaviours 36, 37)."""

import json
import os
import shutil
import subprocess
import sys

import cosformer
import torch
from cosformer import _library
from helpers import PYTHON


def import_in(path, **environment):
    """The last line that `import cosformer` leaves on stderr in a new process ("" = it works)."""
    unset = {key: value for key, value in os.environ.items() if key != "COSFORMER_LIBRARY"}
    result = subprocess.run(
        [sys.executable, "-c", "import cosformer"],
        env={**unset, "PYTHONPATH": str(path), **environment},
        capture_output=True,
        text=True,
    )
    return result.stderr.strip().splitlines()[-1] if result.returncode else ""


def copied_package(tmp_path, in_tree=True):
    """As in a source tree, or as pip leaves it: without one around it."""
    shutil.copytree(PYTHON / "cosformer", tmp_path / "python" / "cosformer")
    if in_tree:
        (tmp_path / "CMakeLists.txt").touch()
    return tmp_path / "python"


def copied_library(folder, torch_version=None):
    library = _library.find_library()
    target = folder / library.name
    target.symlink_to(library)
    record = json.loads(library.with_suffix(".json").read_text())
    record["torch"] = torch_version or record["torch"]
    target.with_suffix(".json").write_text(json.dumps(record))
    return target


REINSTALL = "`pip install --no-build-isolation --force-reinstall --no-deps .`"


def test_behaviour_36_no_library(tmp_path):
    message = import_in(copied_package(tmp_path))
    assert message.startswith("ImportError: cosformer: its operator library")
    assert "`make build`" in message and "COSFORMER_LIBRARY" in message and "pip" not in message


def test_behaviour_36_no_library_where_pip_installed(tmp_path):
    message = import_in(copied_package(tmp_path, in_tree=False))
    assert message.startswith("ImportError: cosformer: its operator library")
    assert REINSTALL in message and "make" not in message


def test_behaviour_36_a_library_that_does_not_exist_or_load(tmp_path):
    missing = import_in(PYTHON, COSFORMER_LIBRARY=str(tmp_path / "nothing.so"))
    assert missing.startswith("ImportError: cosformer: COSFORMER_LIBRARY names")
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    broken.with_suffix(".json").write_text(json.dumps({"torch": torch.__version__}))
    message = import_in(PYTHON, COSFORMER_LIBRARY=str(broken))
    assert message.startswith(f"ImportError: cosformer: {broken} does not load")


def test_behaviour_37_another_torch(tmp_path):
    for in_tree, again in ((True, "`make build`"), (False, REINSTALL)):
        folder = tmp_path / str(in_tree)
        package = copied_package(folder, in_tree)
        copied_library(package / "cosformer", torch_version="2.1.0")
        message = import_in(package)
        assert message.startswith("ImportError: cosformer: ")
        assert f"was built for torch 2.1.0, this is torch {torch.__version__}" in message
        assert '`pip install "torch==2.1.*"`' in message and again in message


def test_behaviour_37_another_patch_release_is_the_same_torch(tmp_path):
    package = copied_package(tmp_path)
    minor = ".".join(torch.__version__.split(".")[:2])
    copied_library(package / "cosformer", torch_version=f"{minor}.999")
    assert import_in(package) == ""


def test_no_record_of_the_torch_version(tmp_path):
    package = copied_package(tmp_path)
    record = copied_library(package / "cosformer").with_suffix(".json")
    for text in ("[]", "7", '{"torch": 2}', "{"):
        record.write_text(text)
        assert "records the torch that" in import_in(package)
    record.unlink()
    assert "records the torch that" in import_in(package)


def test_no_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch')")
    package = copied_package(tmp_path)
    message = import_in(f"{tmp_path}{os.pathsep}{package}")
    assert message.startswith("ImportError: cosformer needs PyTorch")
    assert message.endswith("`pip install torch`")
    copied_library(package / "cosformer", torch_version="2.1.0")
    message = import_in(f"{tmp_path}{os.pathsep}{package}")
    assert message.endswith('`pip install "torch==2.1.*"`')


def test_the_library_beside_the_package_and_in_a_build_tree(tmp_path):
    package = copied_package(tmp_path)
    build = tmp_path / "build" / "release" / "python"
    build.mkdir(parents=True)
    library = copied_library(build)
    assert import_in(package) == ""
    library.rename(package / "cosformer" / library.name)
    library.with_suffix(".json").rename(package / "cosformer" / f"{library.stem}.json")
    assert import_in(package) == ""


def test_release_is_preferred_among_builds(tmp_path, monkeypatch):
    for name in ("debug", "release", "other"):
        folder = tmp_path / "build" / name / "python"
        folder.mkdir(parents=True)
        (folder / "libcosformer_torch.so").touch()
    monkeypatch.setattr(_library, "_TREE", tmp_path)
    monkeypatch.setattr(_library, "_PACKAGE", tmp_path)
    monkeypatch.delenv("COSFORMER_LIBRARY", raising=False)
    assert _library.find_library().parts[-3] == "release"


def test_version_and_instruction_set():
    assert cosformer.__version__.count(".") == 2
    assert cosformer.isa() in ("amx", "avx512", "avx2", "generic")
