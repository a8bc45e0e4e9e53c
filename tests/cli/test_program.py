"""What the program does when all is well."""

import json
import math
import os
import pathlib
import pty
import re
import struct
import subprocess
import time

import pytest
from cli_runner import PROGRAM, ROOT, losses, metrics


def test_version_and_help(program):
    assert re.fullmatch(r"cosformer \d+\.\d+\.\d+ \(\w+\)\n", program.ok("--version").stdout)
    help_text = program.ok("--help").stdout
    for command in ("train", "eval", "generate", "info", "plot", "bench", "advise"):
        assert command in help_text
        assert "Example" in program.ok(command, "--help").stdout
    assert "Examples:" in help_text


def test_training_learns_and_reports(program, tmp_path):
    run = tmp_path / "run"
    done = program.ok(
        *("train", "tiny.toml", "--data", "text.txt", "--out", run, "--json"),
        *("--set", "train.steps=150", "--set", "train.eval_every=50"),
    )
    report = json.loads(done.stdout)
    assert report["step"] == 150 and not report["interrupted"]
    assert report["last"]["loss"] < report["unigram_loss"]
    first = [line["loss"] for line in metrics(run) if line["type"] == "train"][0]
    assert report["last"]["loss"] < first - 0.5
    assert math.isclose(
        report["last"]["perplexity"], math.exp(report["last"]["loss"]), rel_tol=1e-9
    )
    assert report["min_denominator"] >= 0 and 0 <= report["clamped_share"] <= 1
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    # The start says what runs where; plain lines, no bar.
    assert "1 thread" in done.stderr and "\r" not in done.stderr
    assert re.search(r"step 50: validation loss \d", done.stderr)
    # eval finds the same number again from the folder alone.
    again = json.loads(program.ok("eval", run, "--json").stdout)
    assert again["loss"] == report["best"]["loss"]
    assert again["part"] == "validation"
    assert again["tokens"] == report["best"]["tokens"]


def test_report_for_people(program, tmp_path):
    done = program.ok("train", "tiny.toml", "--data", "text.txt", "--out", tmp_path / "run")
    for part in ("unigram baseline", "bigram baseline", "bits/byte", "perplexity"):
        assert part in done.stdout
    for part in ("smallest denominator", "checkpoints/best", "cosformer generate", "loss.png"):
        assert part in done.stdout


def test_eval_of_other_data_takes_it_whole(program, trained, tmp_path):
    text = "the cat sat on a mat. the dog ran\n" * 30
    (tmp_path / "other.txt").write_text(text)
    result = json.loads(
        program.ok("eval", trained, "--data", tmp_path / "other.txt", "--json").stdout
    )
    assert result["part"] == "all" and result["tokens"] == len(text) - 1
    part = program.ok(
        "eval", trained, "--data", tmp_path / "other.txt", "--part", "validation", "--json"
    )
    assert json.loads(part.stdout)["tokens"] < len(text) / 5
    # Every name of a model is the same model.
    names = [trained, trained / "checkpoints", trained / "checkpoints" / "best"]
    found = {json.loads(program.ok("eval", name, "--json").stdout)["loss"] for name in names}
    assert len(found) == 1
    assert "nats/token" in program.ok("eval", trained).stdout


def test_generation_is_a_function_of_its_seed(program, trained):
    def write(*more):
        return program.ok("generate", trained, "--prompt", "the ", "--tokens", "25", *more).stdout

    assert write("--seed", "3") == write("--seed", "3")
    assert write("--seed", "3") != write("--seed", "4")
    greedy = write("--temperature", "0")
    assert greedy == write("--temperature", "0", "--seed", "9") == write("--top-k", "1")
    assert greedy.startswith("the ") and len(greedy) == len("the ") + 25 + 1
    result = json.loads(write("--json", "--temperature", "0"))
    assert result["prompt"] + result["text"] + "\n" == greedy
    assert len(result["tokens"]) == 25
    rolled = write("--tokens", "90", "--rolling")
    assert len(rolled) == len("the ") + 90 + 1


def test_a_prompt_may_come_from_a_file(program, trained, tmp_path):
    (tmp_path / "prompt.txt").write_text("the cat")
    by_file = program.ok(
        "generate", trained, "--prompt-file", tmp_path / "prompt.txt", "--tokens", "9"
    )
    by_text = program.ok("generate", trained, "--prompt", "the cat", "--tokens", "9")
    assert by_file.stdout == by_text.stdout


def test_text_comes_as_it_is_written(program, trained):
    process = program.start(
        *("generate", trained, "--prompt", "the ", "--tokens", "100000000", "--rolling")
    )
    started = os.read(process.stdout.fileno(), 50)
    assert started.startswith(b"the ") and process.poll() is None
    process.terminate()
    assert process.wait(timeout=30) == 128 + 15
    process.stdout.close()
    process.stderr.close()


def test_output_is_whole_characters(program, tmp_path):
    (tmp_path / "text.txt").write_text("Ωμέγα 漢字 naïve 🙂 " * 200, encoding="utf-8")
    run = tmp_path / "run"
    program.ok(
        *("train", "tiny.toml", "--data", tmp_path / "text.txt", "--out", run),
        *("--set", "data.tokenizer=bytes", "--set", "train.steps=30"),
    )
    for seed in range(3):
        done = subprocess.run(
            [PROGRAM, "generate", run, "--prompt", "Ω漢", "--rolling", "--tokens", "200"]
            + ["--seed", str(seed), "--temperature", "1.5"],
            capture_output=True,
            check=True,
        )
        done.stdout.decode("utf-8")  # strict
        assert done.stdout.decode("utf-8").startswith("Ω漢")


def test_info(program, trained):
    info = json.loads(program.ok("info", trained, "--json").stdout)
    assert info["config"]["embed_dim"] == 16 and info["tokenizer"] == "characters"
    # Two layers of 2 heads: 2 x 8 features with the cosine, 8 values and a sum.
    assert info["state_bytes"] == 2 * 2 * 16 * 9 * 4
    assert info["cache_bytes_per_token"] == 0
    from safetensors import safe_open

    with safe_open(trained / "checkpoints" / "best" / "model.safetensors", "pt") as file:
        count = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    assert info["parameters"] == count
    text = program.ok("info", trained).stdout
    for part in ("cosformer M=32", "parameters", "characters", "a sequence", info["isa"]):
        assert part in text


KINDS = {
    "softmax": ([], "softmax"),
    "softmax-window": (["window=4", "dilation=2"], "softmax window=4 dilation=2"),
    "linear": (["feature_map=relu"], "linear relu"),
    "cosformer": (["normalizer=none"], "cosformer M=32 normalizer=none"),
    "performer": (["num_features=24"], "performer features=24"),
    "longformer": (["window=3", "global_tokens=2"], "longformer window=3 global_tokens=2"),
    "bigbird": (["block_size=8"], "bigbird blocks of 8: window 3, global 1+0, random 3"),
}
# A sequence of any length, and a token: two layers of two heads of 8.
STATE_BYTES = {
    "softmax": (0, 2 * 2 * 8 * 2 * 4),
    "softmax-window": (2 * 9 * 2 * 8 * 2 * 4, 0),
    "linear": (2 * 2 * 8 * 9 * 4, 0),
    "cosformer": (2 * 2 * 16 * 9 * 4, 0),
    "performer": (2 * 2 * 24 * 10 * 4, 0),
    "longformer": (2 * 2 * (2 + 4) * 2 * 8 * 2 * 4, 0),
    "bigbird": (0, 2 * 2 * 8 * 2 * 4),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_trains_writes_and_is_described(program, tmp_path, name):
    options, described = KINDS[name]
    settings = ["model.attention.kind=" + name.split("-")[0], "train.steps=4", "train.eval_every=4"]
    settings += ["model.attention." + option for option in options]
    run = tmp_path / "run"
    sets = [part for setting in settings for part in ("--set", setting)]
    program.ok("train", "tiny.toml", "--data", "text.txt", "--out", run, *sets)
    written = program.ok("generate", run, "--prompt", "the ", "--tokens", "20").stdout
    assert written.startswith("the ")
    assert described in program.ok("info", run).stdout
    info = json.loads(program.ok("info", run, "--json").stdout)
    assert (info["state_bytes"], info["cache_bytes_per_token"]) == STATE_BYTES[name]


def test_plot_alone(program, trained, tmp_path):
    done = program.ok("plot", trained, "--out", tmp_path / "loss.png")
    assert done.stdout == f"{tmp_path}/loss.png\n"
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def png_size(path):
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    return struct.unpack(">II", data[16:24])


def test_plot_attention(program, trained, tmp_path):
    whole, part = tmp_path / "whole.png", tmp_path / "part.png"
    done = program.ok("plot", "attention", trained, "--text", "the cat sat", "--out", whole)
    assert done.stdout == f"{whole}\n" and "the first 11 tokens" in done.stderr
    program.ok(
        *("plot", "attention", trained, "--text", "the cat sat", "--out", part),
        *("--heads", "1", "--tokens", "5"),
    )
    # A picture a layer and head: one of the two heads takes about half the width.
    (width, height), (part_width, part_height) = png_size(whole), png_size(part)
    assert part_height == height and part_width < 0.6 * width
    assert whole.read_bytes() != part.read_bytes()


def test_plot_profile(program, trained, tmp_path):
    usual, other = tmp_path / "usual.png", tmp_path / "other.png"
    assert program.ok("plot", "profile", "--out", usual).stdout == f"{usual}\n"
    program.ok("plot", "profile", trained, "--out", other)
    assert png_size(usual) == png_size(other)
    assert usual.read_bytes() != other.read_bytes()


def test_no_gnuplot_no_harm(program, tmp_path):
    run = tmp_path / "run"
    done = program.ok(
        *("train", "tiny.toml", "--data", "text.txt", "--out", run, "--set", "train.steps=5"),
        env={"PATH": str(tmp_path)},
    )
    assert "gnuplot: not found" in done.stderr
    assert not (run / "loss.png").exists()


def on_terminal(command, columns, folder):
    """What a terminal of that width would have been sent."""
    pid, terminal = pty.fork()
    if pid == 0:
        import fcntl
        import termios

        fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        os.chdir(folder)
        os.environ.update(OMP_NUM_THREADS="1", LC_ALL="C.UTF-8", TERM="xterm")
        os.execv(command[0], command)
    output = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:
            break
        if not part:
            break
        output += part
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), output.decode()


def test_a_bar_on_a_terminal_that_fits_it(program, tmp_path):
    command = [str(PROGRAM), "train", "tiny.toml", "--data", "text.txt"]
    for columns in (40, 100):
        out = tmp_path / f"run{columns}"
        status, output = on_terminal([*command, "--out", str(out)], columns, program.folder)
        assert status == 0, output
        drawings = re.findall(r"\r([^\r\n]*)\x1b\[K", output)
        assert any("step 40/40" in drawing for drawing in drawings), output
        assert all(len(drawing) < columns for drawing in drawings)
        if columns == 100:
            assert any("━" in drawing and "tokens/s" in drawing for drawing in drawings)
            assert any("val " in drawing for drawing in drawings)


def test_two_trainings_do_not_share_a_folder(program, tmp_path):
    run = tmp_path / "run"
    arguments = ("train", "tiny.toml", "--data", "text.txt", "--out", run)
    first = program.start(*arguments, "--set", "train.steps=1000000")
    try:
        wait_for(lambda: len(losses(run)) > 3)
        second = program(*arguments, "--resume", "--set", "train.steps=1000000")
        assert second.returncode == 1
        assert "another training" in second.stderr
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_shipped_configs_parse(program, tmp_path):
    configs = sorted((ROOT / "configs").rglob("*.toml"))
    assert pathlib.Path(ROOT / "configs" / "demo.toml") in configs
    for config in configs:
        # A folder in the way: the config is read and judged, nothing is trained.
        (tmp_path / "file").write_text("")
        done = program("train", config, "--data", "text.txt", "--out", tmp_path / "file")
        assert done.returncode == 1 and "a file has this name" in done.stderr, (config, done.stderr)
