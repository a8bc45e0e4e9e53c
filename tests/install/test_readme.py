"""The README's programs and commands do what it says."""

import os
import re
import shlex
import sys

from conftest import BUILD, ROOT, run

README = (ROOT / "README.md").read_text()


def block(language, which=0, of=1):
    found = re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)
    assert len(found) == of, f"README.md has {len(found)} {language} blocks, expected {of}"
    return found[which]


def test_cpp_program(build_consumer, torch_dir, tmp_path):
    (tmp_path / "main.cc").write_text(block("cpp"))
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(readme LANGUAGES CXX)\n"
        "add_executable(consumer main.cc)\n"
        "set_target_properties(consumer PROPERTIES CXX_STANDARD 20)\n"
        + block("cmake").replace("program", "consumer")
    )
    program = build_consumer(tmp_path, f"-DTorch_DIR={torch_dir}")
    assert run(program).strip() == "[1, 4096, 8, 64] [1, 1, 8, 64]"


def run_python(program):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    return run(sys.executable, "-c", program, env=environment)


def test_python_program():
    out = run_python(block("python", 0, of=2))
    assert "torch.Size([1, 4096, 8, 64]) torch.Size([1, 1, 8, 64]) tensor([4097])" in out


def test_python_comparison_of_kinds():
    program = block("python", 1, of=2)
    assert program == (ROOT / "examples/compare_kinds.py").read_text()
    lines = run_python(program).splitlines()
    kinds = "softmax cosformer linear performer linformer longformer bigbird".split()
    assert [line.split()[0] for line in lines] == kinds
    for line in lines:
        found = re.fullmatch(r"\w+ +\d+ ms +\d+ MB   from softmax: (\d+\.\d\d)", line)
        assert found and (float(found[1]) == 0) == line.startswith("softmax"), line


def test_program_commands(tmp_path):
    """The program's commands, in order, on the README itself as text and three steps."""
    commands = re.findall(r"^    (cosformer .*?)(?:\s+#.*)?$", README, re.M)
    assert [shlex.split(c)[1] for c in commands] == [
        *("train", "train", "eval", "generate", "info", "plot", "plot", "bench", "advise"),
    ]
    short = (
        "--set train.steps=3 --set train.context=32 --set model.max_len=64 --set train.batch_size=2"
    )
    for command in commands:
        parts = shlex.split(command.replace("TEXT", str(ROOT / "README.md")))
        if parts[1] == "train":
            if parts[2].endswith(".toml"):
                parts[2] = str(ROOT / parts[2])
            parts += shlex.split(short)
        if parts[1] == "generate":
            parts[parts.index("--tokens") + 1] = "10"
        if parts[1] == "bench":
            parts += shlex.split("--lengths 64,128 --seconds 5")
        if parts[1] == "advise":
            parts[parts.index("--length") + 1] = "256"
            parts += shlex.split("--seconds 5")
        run(BUILD / "cli" / "cosformer", *parts[1:], cwd=tmp_path)


def test_named_files_exist():
    for path in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / path).exists(), f"README.md links to {path}"
