"""Ctrl-C, kill -9 and going on: the same losses, bit for bit, as a run never stopped."""

import json
import random
import signal
import time

from cli_runner import fingerprint, losses, metrics
from safetensors import safe_open

SETTINGS = [
    *("--set", "train.steps=600", "--set", "train.checkpoint_every=3"),
    *("--set", "train.eval_every=8", "--set", "model.dropout=0.2"),
]


def arguments(run):
    return ("train", "tiny.toml", "--data", "text.txt", "--out", run, *SETTINGS)


def steps_done(run):
    return max((step for kind, step, _ in losses(run) if kind == "train"), default=0)


def check_last(run):
    """`last` and `best` are whole checkpoints, or not there at all."""
    for link in ("last", "best"):
        folder = run / "checkpoints" / link
        if not folder.is_symlink():
            continue
        assert folder.is_dir(), f"{link} points to nothing"
        state = json.loads((folder / "training_state.json").read_text())
        assert folder.resolve().name == f"step-{state['step']}"
        for file in ("model.safetensors", "optimizer.safetensors"):
            with safe_open(folder / file, "pt") as tensors:
                for name in tensors.keys():
                    tensors.get_tensor(name)
        json.loads((folder / "config.json").read_text())


def test_killed_at_any_moment_and_resumed_is_never_stopped(program, tmp_path):
    straight, run = tmp_path / "straight", tmp_path / "killed"
    program.ok(*arguments(straight))
    random.seed(1)
    kills = 0
    while True:
        more = ("--resume",) if (run / "config.toml").exists() else ()
        process = program.start(*arguments(run), *more)
        # After some steps beyond where it was, at a moment between any two.
        goal = steps_done(run) + random.randint(1, 14) if kills % 5 else 0
        end = time.monotonic() + 60
        while process.poll() is None and steps_done(run) < goal:
            assert time.monotonic() < end, "no progress"
            time.sleep(0.002)
        # Each fifth time at a moment of the start.
        time.sleep(random.uniform(0, 0.02 if goal else 0.8))
        process.send_signal(signal.SIGKILL)
        stderr = process.communicate()[1]
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, stderr
        kills += 1
        check_last(run)
        if kills == 25:
            program.ok(*arguments(run), "--resume")
            break
    assert kills >= 20
    assert losses(run) == losses(straight)
    a, b = (fingerprint(r / "checkpoints" / "last") for r in (straight, run))
    same = ("model.safetensors", "optimizer.safetensors", "config.json")
    assert {name: a[name] for name in same} == {name: b[name] for name in same}
    leftovers = [path for path in (run / "checkpoints").iterdir() if path.name.endswith(".tmp")]
    assert not leftovers
    program.ok("eval", run)


def test_ctrl_c_saves_and_says_how_to_go_on(program, tmp_path):
    straight, run = tmp_path / "straight", tmp_path / "stopped"
    program.ok(*arguments(straight))
    for kind, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        more = ("--resume",) if run.exists() else ()
        process = program.start(*arguments(run), *more, "--json")
        goal = steps_done(run) + 20
        while process.poll() is None and steps_done(run) < goal:
            time.sleep(0.002)
        process.send_signal(kind)
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == status, stderr
        report = json.loads(stdout)
        assert report["interrupted"] and report["step"] == steps_done(run)
        assert stderr.splitlines()[-1].endswith(f"cosformer train --out {run} --resume")
        step = steps_done(run)
        # Saved where it stopped: nothing is computed twice.
        state = json.loads((run / "checkpoints" / "last" / "training_state.json").read_text())
        assert state["step"] == step
    # The stored config is enough to go on.
    program.ok("train", "--out", run, "--resume")
    assert losses(run) == losses(straight)
    assert len([line for line in metrics(run) if line["type"] == "start"]) == 1
