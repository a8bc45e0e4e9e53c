"""Runs the real program in processes of its own, on tiny models."""

import hashlib
import json
import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("COSFORMER_BUILD", "build/release")
PROGRAM = BUILD / "cli" / "cosformer"

WORDS = ["the ", "cat ", "sat ", "on ", "a ", "mat. ", "dog ", "ran\n"]


def sample_text(size):
    """About `size` characters of words that repeat with some surprise."""
    text, state = [], 1
    while size > 0:
        state = (state * 1664525 + 1013904223) % 2**32
        text.append(WORDS[state >> 29])
        size -= len(text[-1])
    return "".join(text)


CONFIG = """
[model]
embed_dim = 16
num_layers = 2
num_heads = 2
max_len = 32
dropout = 0.1
[train]
context = 32
batch_size = 4
steps = 40
lr = 1e-2
warmup_steps = 5
eval_every = 20
checkpoint_every = 10
log_every = 1
threads = 1
"""


class Program:
    def __init__(self, folder):
        self.folder = folder

    def __call__(self, *arguments, **options):
        """Runs `cosformer ARGUMENTS` and returns the completed process, its output as text."""
        options.setdefault("cwd", self.folder)
        options.setdefault("stdout", subprocess.PIPE)
        command = [str(part) for part in (PROGRAM, *arguments)]
        options["env"] = self.environment(options.get("env"))
        return subprocess.run(
            command,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=120,
            **options,
        )

    def start(self, *arguments, **options):
        """The same, still running."""
        options.setdefault("cwd", self.folder)
        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("stderr", subprocess.PIPE)
        command = [str(part) for part in (PROGRAM, *arguments)]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, text=True, env=self.environment(), **options
        )

    @staticmethod
    def environment(changes=None):
        return {**os.environ, "OMP_NUM_THREADS": "1", **(changes or {})}

    def ok(self, *arguments, **options):
        done = self(*arguments, **options)
        assert done.returncode == 0, done.stderr
        return done


def metrics(run):
    """The lines of metrics.jsonl; one that is being written is left out."""
    lines = []
    path = pathlib.Path(run) / "metrics.jsonl"
    if path.exists():
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                lines.append(json.loads(line))
    return lines


def losses(run):
    """(type, step, loss) of each line: floats compare bit for bit."""
    return [(line["type"], line["step"], line["loss"]) for line in metrics(run) if "loss" in line]


def fingerprint(folder):
    """What every file of a folder holds, and where its links point."""
    found = {}
    for path in sorted(pathlib.Path(folder).rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
