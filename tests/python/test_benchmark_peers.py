"""The peers' side of the benchmarks: programs in torch agree with ours, a wrong one is found."""

import json
import os
import subprocess
import sys

import pytest
import torch
from helpers import PYTHON

ROOT = PYTHON.parent


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.peers", "--heads=2", "--threads=1", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(PYTHON)},
        capture_output=True,
        text=True,
    )


def test_programs_in_torch_agree_with_ours(tmp_path):
    file = tmp_path / "peers.json"
    done = run("--peers=sdpa,eager,chunked", "--lengths=64,192", "--head-dims=16", f"--json={file}")
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    results = record["results"]
    # Of each length: SDPA three times, two eager programs, the chunked one; two passes.
    assert len(results) == 2 * 6 * 2
    for each in results:
        assert each["ours_ms"] > 0 and each["peer_ms"] > 0 and each["ratio"] > 0
        if each["ours"] == "cosformer causal" and each["peer"] == "SDPA causal":
            assert each["differs_by"] is None
        else:
            assert each["differs_by"] < 1e-5
    assert record["torch"] == torch.__version__
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(results)


def test_a_peer_that_is_missing_is_skipped_with_what_installs_it():
    done = run("--peers=public-cosformer", "--lengths=64")
    assert done.returncode == 0
    assert "skipped (no file given). Give its file: --public-cosformer" in done.stderr


def test_an_unknown_peer_is_an_error():
    done = run("--peers=none-such")
    assert done.returncode != 0
    assert "no peer is named 'none-such': there are sdpa, eager, chunked" in done.stderr


def test_a_peer_that_computes_something_else_is_not_timed(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.peers.inputs import cosformer_causal, qkv_sides
    from benchmarks.peers.measure import Comparison, Disagreement, measure
    from benchmarks.peers.torch_eager import quadratic

    def wrong(q, k, v):
        out = quadratic(q, k, v)
        return out + 1e-3 * out.abs().max()

    def compare(peer):
        return measure(
            Comparison(
                "ours",
                "peer",
                32,
                2,
                8,
                lambda: qkv_sides(cosformer_causal(32), peer, 32, 2, 8),
            ),
            most_rounds=1,
            with_memory=False,
            only_required=False,
        )

    assert [result.of for result in compare(quadratic)] == ["forward", "forward + backward"]
    with pytest.raises(Disagreement, match="forward: the peer's result differs from ours by"):
        compare(wrong)
