"""The source distribution, the wheel that is built from it, and the package installed from that.

The build lies in the unpacked source as a developer's does in the tree (build/release, with the
interpreter in build/venv): so its compilations are the same to ccache, and the test takes seconds
where `make build` has run before.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from conftest import ROOT, run

VERSION = re.search(r"project\(cosformer VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[
    1
]
COMMAND = "pip install --no-build-isolation ."


def clean_environment(**changes):
    """Nothing of the tree, and no other settings of the library."""
    kept = {
        k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("COSFORMER")
    }
    return kept | changes


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    where = tmp_path_factory.mktemp("sdist")
    program = f"from scikit_build_core.build import build_sdist; build_sdist({str(where)!r})"
    run(sys.executable, "-c", program, cwd=ROOT)
    (found,) = where.iterdir()
    return found


@pytest.fixture(scope="module")
def source(sdist, tmp_path_factory):
    """The unpacked source, which has an interpreter with torch in build/venv."""
    where = tmp_path_factory.mktemp("source")
    with tarfile.open(sdist) as archive:
        archive.extractall(where, filter="data")
    (folder,) = where.iterdir()
    (folder / "build").mkdir()
    (folder / "build" / "venv").symlink_to(sys.prefix)
    return folder


def pip_wheel(source, target, **environment):
    python = source / "build" / "venv" / "bin" / "python3"
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(target)]
    settings = ["-C", "build-dir=build/release", "-C", "cmake.define.COSFORMER_WERROR=ON"]
    environment = {"CXX": "c++", **environment}  # the compiler's name counts for ccache
    return subprocess.run(
        [str(python), "-m", "pip", "wheel", *options, *settings, "."],
        cwd=source,
        env=clean_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    where = tmp_path_factory.mktemp("wheel")
    done = pip_wheel(source, where)
    assert done.returncode == 0, done.stdout
    (found,) = where.iterdir()
    return found


def make_venv(where, wheel, torch=True):
    """A new environment, with torch and safetensors of the one that runs the tests; its python."""
    run(sys.executable, "-m", "venv", "--without-pip", where)
    python = where / "bin" / "python3"
    if torch:
        site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        theirs = run(sys.executable, "-c", "import torch; print(torch.__file__)").strip()
        pathlib.Path(site, "torch.pth").write_text(str(pathlib.Path(theirs).parents[1]))
    # With torch there its requirements are met; with --no-index nothing else could meet them.
    dependencies = [] if torch else ["--no-deps"]
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-index",
        *dependencies,
        wheel,
    )
    return python


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    return make_venv(tmp_path_factory.mktemp("installed") / "venv", wheel)


def installed_package(python):
    (found,) = python.parents[1].glob("lib/python*/site-packages/cosformer")
    return found


def import_error(python, cwd):
    done = subprocess.run(
        [str(python), "-c", "import cosformer"],
        cwd=cwd,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


def info(python, cwd):
    done = subprocess.run(
        [str(python), "-m", "cosformer.info", "--json"],
        cwd=cwd,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    return done.returncode, json.loads(done.stdout)


def test_sdist_holds_what_the_build_needs_and_nothing_else(sdist):
    assert sdist.name == f"cosformer-{VERSION}.tar.gz"
    with tarfile.open(sdist) as archive:
        files = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {name for name in files if "/" not in name} == {
        *("CMakeLists.txt", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"),
    }
    assert {name.split("/")[0] for name in files if "/" in name} == {
        "cmake",
        "include",
        "python",
        "src",
    }
    assert {name.split("/")[1] for name in files if name.startswith("src/")} == {
        "base",
        "kernels",
        "ops",
    }
    assert all(
        re.search(r"\.(cc|h|py|cmake|txt|typed|toml|md)$|LICENSE|PKG-INFO", name) for name in files
    )
    tree = {str(path.relative_to(ROOT)) for path in (ROOT / "python").rglob("*.py")}
    assert tree == {name for name in files if name.endswith(".py")}


def test_wheel_holds_the_package_its_library_and_highway(wheel):
    assert re.fullmatch(rf"cosformer-{re.escape(VERSION)}-py3-none-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
        metadata = archive.read(f"cosformer-{VERSION}.dist-info/METADATA").decode()
        record = json.loads(archive.read("cosformer/libcosformer_torch.json"))
    libraries = {name for name in files if ".so" in name}
    assert libraries == {"cosformer/libcosformer_torch.so", "cosformer/libhwy.so.1"}
    assert {name.split("/")[0] for name in files} == {"cosformer", f"cosformer-{VERSION}.dist-info"}
    assert {"cosformer/py.typed", f"cosformer-{VERSION}.dist-info/licenses/LICENSE"} <= files
    assert record["version"] == VERSION
    for line in (
        f"Version: {VERSION}",
        "Requires-Python: >=3.10",
        "Requires-Dist: torch==2.13.*",
        "Requires-Dist: safetensors>=0.4",
        "Requires-Dist: numpy",
        "Provides-Extra: transformers",
    ):
        assert line in metadata.splitlines()


PROGRAM = """
import json, sys, torch, cosformer
q = torch.randn(2, 70, 4, 16, requires_grad=True)
out, state = cosformer.cosformer_attention(
    q, q, q, reweight_len=100, is_causal=True, return_state=True
)
out.sum().backward()
state.save("state.safetensors")
layer = cosformer.nn.CosformerAttention(32, 2, reweight_len=100)
config = cosformer.ModelConfig(vocab_size=16, embed_dim=32, num_layers=1, attention="cosformer")
model = cosformer.Transformer(config)
model.save_pretrained("model")
maps = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
print(json.dumps({
    "shape": list(out.shape), "finite": bool(q.grad.isfinite().all()),
    "version": cosformer.__version__,
    "layer": list(layer(torch.randn(1, 5, 32)).shape), "package": cosformer.__file__,
    "tokens": cosformer.generate(model, [1, 2], max_new_tokens=3).numel(),
    "maps": sorted(m for m in maps if "hwy" in m or "cosformer" in m or "libtorch_cpu" in m),
}))
"""


def system_highway():
    """The libraries that a package manager put on this machine."""
    folders = ("/usr/lib", "/usr/local/lib", "/lib")
    found = (p for folder in folders for p in pathlib.Path(folder).rglob("libhwy.so*"))
    return sorted({str(path.resolve()) for path in found})


def without_system_highway(command):
    """The command in a mount namespace where these files are empty; as it is where none can be."""
    script = (
        "".join(f"mount --bind /dev/null {path} && " for path in system_highway()) + 'exec "$@"'
    )
    hidden = ["unshare", "--mount", "sh", "-c", script, "sh"]
    allowed = subprocess.run([*hidden, "true"], capture_output=True).returncode == 0
    return ([*hidden] if allowed else []) + [str(part) for part in command]


def test_runs_outside_the_tree_without_the_systems_highway(python, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = without_system_highway([python, tmp_path / "program.py"])
    found = json.loads(run(*command, cwd=tmp_path, env=clean_environment()).splitlines()[-1])
    package = installed_package(python)
    assert found["shape"] == [2, 70, 4, 16] and found["finite"] and found["layer"] == [1, 5, 32]
    assert found["version"] == VERSION and found["tokens"] == 3
    assert found["package"] == str(package / "__init__.py")
    maps = found["maps"]
    assert [m for m in maps if "hwy" in m] == [str(package / "libhwy.so.1")]
    assert [m for m in maps if "libcosformer" in m] == [str(package / "libcosformer_torch.so")]
    assert len([m for m in maps if "libtorch_cpu" in m]) == 1
    assert (tmp_path / "state.safetensors").is_file() and (tmp_path / "model/config.json").is_file()


def test_its_library_looks_beside_itself_and_for_torch(python):
    said = run("readelf", "-d", installed_package(python) / "libcosformer_torch.so")
    (runpath,) = re.findall(r"R(?:UN)?PATH.*\[(.*)\]", said)
    assert runpath == "$ORIGIN:$ORIGIN/../torch/lib"
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", said))
    assert not [name for name in needed if "python" in name or "sentencepiece" in name]


def test_info(python, tmp_path):
    status, found = info(python, tmp_path)
    assert status == 0 and found["error"] is None and found["version"] == VERSION
    assert found["library"] == str(installed_package(python) / "libcosformer_torch.so")


def test_behaviours_36_37_what_is_wrong_with_an_installed_package(python, wheel, tmp_path):
    again = "`pip install --no-build-isolation --force-reinstall --no-deps .`"
    python = make_venv(tmp_path / "venv", wheel)
    package = installed_package(python)
    record = package / "libcosformer_torch.json"
    said = record.read_text()
    record.write_text(json.dumps({"version": VERSION, "torch": "2.1.0"}))
    message = import_error(python, tmp_path)
    assert "was built for torch 2.1.0, this is torch" in message
    assert '`pip install "torch==2.1.*"`' in message and again in message
    status, found = info(python, tmp_path)
    assert status == 1 and found["error"] == message[len("ImportError: ") :]
    record.write_text(said)
    (package / "libhwy.so.1").rename(package / "elsewhere")
    if (hidden := without_system_highway([]))[:1] == ["unshare"]:
        done = subprocess.run(
            [*hidden, str(python), "-c", "import cosformer"],
            env=clean_environment(),
            capture_output=True,
            text=True,
        )
        assert (
            "does not load" in done.stderr and "libhwy.so.1" in done.stderr and again in done.stderr
        )
    (package / "libcosformer_torch.so").unlink()
    message = import_error(python, tmp_path)
    assert f"libcosformer_torch.so is missing (looked in {package})" in message and again in message


def test_without_torch(wheel, tmp_path):
    python = make_venv(tmp_path / "venv", wheel, torch=False)
    message = import_error(python, tmp_path)
    assert message.startswith("ImportError: cosformer needs PyTorch")
    assert re.search(r'`pip install "torch==2\.\d+\.\*"`$', message)
    status, found = info(python, tmp_path)
    assert (
        status == 1 and found["torch"] is None and found["error"] == message[len("ImportError: ") :]
    )


@pytest.mark.parametrize("other", ["none", "2.1.0"])
def test_building_without_its_torch_says_what_to_run(source, tmp_path, other):
    """As in a build that pip isolates, where no torch is to be seen."""
    folder = shutil.copytree(
        source, tmp_path / "source", ignore=shutil.ignore_patterns("release"), symlinks=True
    )
    stub = tmp_path / "stub" / "torch"
    stub.mkdir(parents=True)
    if other == "none":
        (stub / "__init__.py").write_text("raise ModuleNotFoundError('No module named torch')")
    else:
        lines = (
            f"__version__ = {other!r}",
            "class version: cuda = hip = None",
            "def compiled_with_cxx11_abi(): return True",
        )
        (stub / "__init__.py").write_text("\n".join(lines))
        (stub / "utils.py").write_text("cmake_prefix_path = '/nowhere'")
    done = pip_wheel(folder, tmp_path / "out", PYTHONPATH=str(stub.parent))
    assert done.returncode != 0
    said = " ".join(done.stdout.split())
    assert "has no PyTorch here" in said if other == "none" else "found PyTorch 2.1.0" in said
    assert 'pip install scikit-build-core "torch==2.13.*"' in said and COMMAND in said
    assert "Traceback" not in done.stdout
