"""What users get wrong: one line that says what was found, what was expected, what to do."""

import json
import os
import resource
import shutil
import subprocess
import tempfile

import pytest
from cli_runner import CONFIG, PROGRAM, fingerprint, losses


def check_error(done, status, *parts):
    """One line on stderr, with every part in it."""
    assert done.returncode == status, (done.returncode, done.stderr)
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("cosformer: "), done.stderr
    for part in parts:
        assert part in lines[0], (part, lines[0])


USAGE = [
    ((), "--help"),
    (("trian",), "did you mean train?"),
    (("train",), "CONFIG.toml is missing"),
    (("train", "--resume"), "--out"),
    (("train", "tiny.toml", "--stepz", "3"), "--stepz"),
    (("train", "tiny.toml", "--set"), "--set"),
    (("train", "tiny.toml", "--set", "train.steps"), "expected key=value"),
    (("train", "tiny.toml", "--set", "train.stepz=3"), "did you mean train.steps?"),
    (("train", "tiny.toml", "--set", "train.steps=many"), "expected an integer"),
    (("train", "tiny.toml", "--set", "train.steps=0"), "at least 1"),
    (("train", "tiny.toml", "--set", "model.num_heads=3"), "num_heads"),
    (("train", "tiny.toml", "--set", "train.context=33"), "model.max_len is 32"),
    (("train", "tiny.toml", "--set", "model.attention.kind=quadratic"), "quadratic"),
    (("generate", "trained"), "--prompt"),
    (("generate", "trained", "--prompt", ""), "--prompt"),
    (("generate", "trained", "--prompt", "the", "--temperature", "-1"), "--temperature"),
    (("generate", "trained", "--prompt", "the", "--tokens", "some"), "--tokens"),
    (("generate", "trained", "--prompt", "the", "--top-p", "1.5"), "--top-p"),
    (("eval",), "MODEL"),
    (("eval", "trained", "--part", "half"), "--part"),
]


@pytest.mark.parametrize("arguments, part", USAGE, ids=[" ".join(a) or "nothing" for a, _ in USAGE])
def test_wrong_use(program, trained, arguments, part):
    before = fingerprint(program.folder)
    check_error(program(*arguments), 2, part)
    assert fingerprint(program.folder) == before


CONFIGS = {
    "misspelt key": ("[train]\nstepz = 3\n", 2, (".toml:2", "train.stepz", "train.steps")),
    "misspelt section": ("[trian]\n", 2, (".toml:1", "[trian]", "[train]")),
    "wrong type": ('[train]\nlr = "fast"\n', 2, (".toml:2", "train.lr", '"fast"', "a number")),
    "not TOML": ("[train\n", 2, (".toml:1", "TOML")),
    "binary": ("\0\1\2\3\x7fELF", 2, (".toml:1",)),
    "empty": ("", 1, ("data.path is empty", "--data")),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_wrong_config(program, tmp_path, name):
    text, status, parts = CONFIGS[name]
    (tmp_path / "run.toml").write_text(text)
    check_error(program("train", tmp_path / "run.toml", "--out", tmp_path / "run"), status, *parts)
    assert not (tmp_path / "run").exists()


def test_wrong_plots(program, trained, tmp_path):
    attention = ("plot", "attention", trained, "--out", tmp_path / "x.png", "--text", "the cat")
    cases = {
        ("plot",): (2, ("no RUN",)),
        ("plot", "attention", trained): (2, ("no text", "--text")),
        ("plot", "attention", tmp_path, "--text", "a"): (1, ("config.json",)),
        (*attention, "--heads", "9"): (1, ("head is 9", "expected 0 to")),
        (*attention, "--layers", "-1"): (1, ("layer is -1",)),
        (*attention, "--tokens", "0"): (1, ("max_tokens is 0",)),
        ("plot", "profile", "--reweight-len", "0"): (1, ("reweight_len is 0", "positive")),
        ("plot", "profile", "--distance", "99999999"): (1, ("max_distance is 99999999",)),
        ("plot", "profile", "--out", tmp_path / "no" / "x.png"): (1, ("gnuplot: failed",)),
        ("plot", "profile", "--reweight", "5"): (2, ("cosformer plot profile --help",)),
    }
    for command, (status, parts) in cases.items():
        check_error(program(*command), status, *parts)
    assert not (tmp_path / "x.png").exists()


def train_on(program, data, out, *more):
    return program("train", "tiny.toml", "--data", data, "--out", out, *more)


def test_missing_files(program, tmp_path):
    check_error(program("train", "no/such.toml"), 1, "no/such.toml")
    check_error(program("train", tmp_path), 2, str(tmp_path), "expected a file")
    check_error(train_on(program, tmp_path / "none.txt", tmp_path / "run"), 1, "none.txt")
    check_error(program("eval", tmp_path / "none"), 1, "none", "expected a run's folder")
    check_error(program("info", tmp_path), 1, "config.json")
    check_error(program("generate", tmp_path, "--prompt", "a"), 1, "config.json")
    check_error(program("plot", tmp_path), 1, "metrics.jsonl")
    assert not (tmp_path / "run").exists()


def test_text_that_cannot_be_learned(program, tmp_path):
    cases = {
        "empty.txt": (b"", "empty"),
        "binary.dat": (bytes(range(256)) * 40, "not a text file"),
        "short.txt": (b"a few words\n", "expected at least 33"),
    }
    for name, (content, part) in cases.items():
        (tmp_path / name).write_bytes(content)
        check_error(train_on(program, tmp_path / name, tmp_path / "run"), 1, name, part)
        assert not (tmp_path / "run" / "config.toml").exists()


def test_run_folder_in_the_way(program, trained, tmp_path):
    before = fingerprint(trained)
    check_error(train_on(program, "text.txt", trained), 1, "trained", "--resume")
    assert fingerprint(trained) == before
    (tmp_path / "file").write_text("mine")
    check_error(train_on(program, "text.txt", tmp_path / "file"), 1, "file", "--out")
    assert (tmp_path / "file").read_text() == "mine"


def test_resume_with_another_text_or_seed(program, trained, tmp_path):
    before = fingerprint(trained)
    (tmp_path / "other.txt").write_text("the cat sat on a mat. " * 100)
    other = tmp_path / "other.toml"
    for lines, part in [
        (f'[data]\npath = "{tmp_path}/other.txt"\n', "data.path is "),
        ('[data]\nextensions = [".md"]\n', "data.extensions is "),
        ("", "train.seed is 5"),
    ]:
        seed = "" if lines else "seed = 5\n"
        other.write_text(CONFIG + seed + lines)
        done = program("train", other, "--out", trained, "--resume")
        check_error(done, 1, part, "was begun with")
    assert fingerprint(trained) == before


def test_resume_with_another_model_or_tokenizer(program, trained):
    before = fingerprint(trained)
    for setting, part in [
        ("model.embed_dim=32", "model.embed_dim is 32"),
        ("model.num_layers=3", "model.num_layers is 3"),
        ("model.attention.kind=softmax", "model.attention"),
        ("data.tokenizer=bytes", "data.tokenizer"),
    ]:
        done = train_on(program, "text.txt", trained, "--resume", "--set", setting)
        check_error(done, 1, part, "was begun with")
    assert fingerprint(trained) == before


@pytest.fixture
def model(trained, tmp_path):
    """A copy of a model folder to break."""
    folder = tmp_path / "model"
    shutil.copytree(trained / "checkpoints" / "best", folder)
    return folder


def test_a_model_of_another_shape(program, model):
    config = json.loads((model / "config.json").read_text())
    config["embed_dim"] = 32
    (model / "config.json").write_text(json.dumps(config))
    check_error(program("eval", model), 1, "expected", "32")
    config["embed_dim"] = 16
    config["num_layers"] = 3
    (model / "config.json").write_text(json.dumps(config))
    check_error(program("generate", model, "--prompt", "the"), 1, "layers.2.")


def test_broken_model_files(program, model):
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    hostile = {
        "truncated": whole[: len(whole) // 2],
        "empty": b"",
        "cut header": whole[:20],
        "huge header": b"\xff" * 7 + b"\x7f" + whole[8:],
        "not JSON": whole[:8] + b"?" + whole[9:],
        "zeros": b"\0" * 4096,
    }
    for name, content in hostile.items():
        weights.write_bytes(content)
        for command in (("eval", model), ("info", model), ("generate", model, "--prompt", "the")):
            check_error(program(*command), 1, "model.safetensors")
        assert weights.read_bytes() == content, name
    weights.write_bytes(whole)
    (model / "config.json").write_text('{"embed_dimm": 16}')
    check_error(program("info", model), 1, "config.json", "embed_dimm", "embed_dim")
    (model / "config.json").write_text('{"embed_dim": "16"}')
    check_error(program("eval", model), 1, "embed_dim")
    (model / "config.json").unlink()
    check_error(program("eval", model), 1, "config.json")


def test_prompts_that_do_not_fit(program, trained, tmp_path):
    check_error(program("generate", trained, "--prompt", "the Ω cat"), 1, "Ω", "4")
    check_error(
        program("generate", trained, "--prompt", "the cat " * 10), 1, "80", "32", "--rolling"
    )
    check_error(program("generate", trained, "--prompt-file", tmp_path / "none"), 1, "none")
    # What fits was streamed before the error.
    done = program("generate", trained, "--prompt", "the cat", "--tokens", "100")
    check_error(done, 1, "32", "--rolling")
    assert done.stdout.startswith("the cat") and len(done.stdout) > 30


def test_eval_without_fitting_data(program, trained, model, tmp_path):
    (tmp_path / "greek.txt").write_text("αβγ " * 100)
    check_error(program("eval", trained, "--data", tmp_path / "greek.txt"), 1, "α")
    (model / "run.toml").unlink()
    check_error(program("eval", model), 2, "--data")
    check_error(program("eval", model, "--data", "text.txt", "--context", "33"), 1, "33", "32")


def test_a_full_disk_loses_nothing(program, tmp_path):
    run = tmp_path / "run"
    train_on(program, "text.txt", run)
    before, kept = fingerprint(run / "checkpoints"), losses(run)
    size = (run / "checkpoints" / "last" / "optimizer.safetensors").stat().st_size

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))

    done = program(
        *("train", "tiny.toml", "--data", "text.txt", "--out", run, "--resume"),
        *("--set", "train.steps=60"),
        preexec_fn=limit,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith("cosformer: ")
    assert "File too large" in done.stderr
    assert fingerprint(run / "checkpoints") == before
    assert losses(run)[: len(kept)] == kept
    program.ok("eval", run)
    # With room again it goes on.
    program.ok("train", "--out", run, "--resume", "--set", "train.steps=60")


@pytest.mark.parametrize("command", ["info", "eval", "generate"])
def test_output_that_cannot_be_written(program, trained, command):
    arguments = [command, trained]
    if command == "generate":
        arguments += ["--prompt", "the", "--tokens", "20"]
    with open("/dev/full", "w") as full:
        check_error(program(*arguments, stdout=full), 1, "stdout", "No space left")
    reader, writer = os.pipe()
    os.close(reader)
    done = program(*arguments, stdout=writer)
    os.close(writer)
    check_error(done, 1, "stdout", "Broken pipe")


def test_closed_stdout_and_stderr_spoil_no_file(program, tmp_path):
    run = tmp_path / "run"
    command = [PROGRAM, "train", "tiny.toml", "--data", "text.txt", "--out", run]
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" "$@" >&- 2>&-', *command],
        cwd=program.folder,
        env=program.environment(),
        timeout=120,
    )
    # The report had nowhere to go.
    assert done.returncode == 1
    for text in (run / "metrics.jsonl").read_text().splitlines():
        assert text.startswith("{") and text.endswith("}"), text
    assert losses(run)[-1][1] == 40


def as_nobody():
    """Options that run a program without root's rights."""
    return (
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.getuid() == 0 else []
    )


def test_no_permission(program):
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        text = os.path.join(name, "text.txt")
        shutil.copy(program.folder / "text.txt", text)
        config = os.path.join(name, "tiny.toml")
        with open(config, "w") as file:
            file.write(CONFIG)
        locked = os.path.join(name, "locked")
        os.mkdir(locked, 0o500 if os.getuid() else 0o755)
        os.chmod(config, 0o644)

        def run(*arguments):
            command = [*as_nobody(), str(PROGRAM), *arguments]
            return subprocess.run(command, cwd=name, capture_output=True, text=True, timeout=60)

        done = run("train", config, "--data", text, "--out", os.path.join(locked, "run"))
        check_error(done, 1, "locked/run", "Permission denied", "--out")
        os.chmod(text, 0o000)
        with tempfile.TemporaryDirectory() as out:
            os.chmod(out, 0o777)
            done = run("train", config, "--data", text, "--out", os.path.join(out, "run"))
        check_error(done, 1, "text.txt", "Permission denied")
        assert os.listdir(locked) == []


def test_an_instruction_set_that_the_machine_lacks(program, trained):
    done = program("generate", trained, "--prompt", "the", env={"COSFORMER_ISA": "avx1024"})
    check_error(done, 1, "avx1024")
