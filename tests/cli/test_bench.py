"""`cosformer bench` and `cosformer advise`: real measurements at tiny lengths."""

import json
import re
import signal
import time

import pytest
from cli_runner import PROGRAM, fingerprint
from test_program import on_terminal
from test_program_errors import check_error

KINDS = (
    "sdpa softmax softmax-t5 window longformer bigbird performer linear relu cosformer linformer"
)
KINDS = KINDS.split()
TINY = (
    *("--lengths", "16,32,64", "--head-dims", "16", "--heads", "2", "--threads", "1"),
    *("--window", "8", "--num-features", "32", "--projected-len", "8", "--repeats", "2"),
    *("--seconds", "6000"),  # every point, however slow the machine
)


@pytest.fixture(scope="module")
def measured(program):
    """A saved bench that the tests only read, and what the program printed."""
    out = program.folder / "bench"
    return out, program.ok("bench", *TINY, "--out", out)


def points(report, **wanted):
    return [p for p in report["points"] if all(p[key] == value for key, value in wanted.items())]


def test_every_kind_is_measured_in_every_form(measured):
    report = json.loads((measured[0] / "bench.json").read_text())
    assert report["format_version"] == 1 and report["complete"]
    assert report["options"]["kinds"] == KINDS
    assert report["machine"]["torch"].startswith("2.") and report["machine"]["isa"]
    assert report["peaks"][0]["flops"] > 1e8 and report["peaks"][0]["read_bytes"] > 1e8
    # 3 lengths x (2 passes x 2 forms + decoding).
    assert len(report["points"]) == 3 * 5 * len(KINDS)
    for point in report["points"]:
        has_form = point["kind"] != "linformer" or not point["causal"]
        assert ("left_out" in point) != has_form, point
        if not has_form:
            assert "mixes all positions" in point["left_out"]
            continue
        assert point["rounds"] == 2
        assert 0 < point["fastest_seconds"] <= point["seconds"] < 1
        assert 0 < point["share"] < 5 and point["extra_bytes"] >= 0
        reference = points(report, **{**key_of(point), "kind": "sdpa"})[0]
        assert point["times_sdpa"] == pytest.approx(reference["seconds"] / point["seconds"])
    # The state of a linear kind is the same at every length, a cache is not.
    sizes = {
        kind: [p["extra_bytes"] for p in points(report, kind=kind, **{"pass": "decode"})]
        for kind in KINDS[:-1]
    }
    assert len(set(sizes["cosformer"])) == 1
    assert sizes["softmax"][0] < sizes["softmax"][1] < sizes["softmax"][2]
    where = {"at", "always ahead", "always behind"}
    assert {each["crossover"]["where"] for each in report["crossovers"]} <= where
    assert {each["against"] for each in report["crossovers"]} == {"sdpa", "softmax"}


def key_of(point):
    return {key: point[key] for key in ("pass", "causal", "length", "head_dim", "threads")}


def test_tables_for_people(measured):
    out, done = measured
    for part in ("median of up to 2 rounds", "GF/s of multiply-adds", "plain loop", "window 8"):
        assert part in done.stdout
    for title in ("forward, causal", "forward + backward, not causal", "decode, head_dim 16"):
        assert title in done.stdout
    table = done.stdout.split("forward, causal")[1].split("\n\n")[0]
    assert re.search(r"kind +16 +32 +64 +share % +x SDPA +memory", table)
    assert re.search(r"\ncosformer( +[\d.,]+){3}", table)
    assert "linformer" not in table
    assert "no causal form: each projected key mixes all positions" in done.stdout
    assert "165 points, in at most about 1h40m" in done.stderr
    assert "\r" not in done.stderr
    assert done.stdout.endswith("".join(f"{out}/{name}\n" for name in FILES))
    markdown = (out / "bench.md").read_text()
    for part in ("Extra memory, MiB", "Share of the floor", "| cosformer |", "## decode"):
        assert part in markdown


FILES = ("bench.json", "bench.md", "time.png", "memory.png")


def test_plots_are_pictures(measured):
    for name in ("time.png", "memory.png"):
        data = (measured[0] / name).read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 20000
    assert sorted(path.name for path in measured[0].iterdir()) == sorted(FILES)


def test_a_choice_of_points(program, tmp_path):
    done = program.ok(
        *("bench", "--kinds", "relu,cosformer", "--lengths", "32,8", "--head-dims", "8,16"),
        *("--heads", "1", "--threads", "1,2", "--passes", "forward", "--causal", "--repeats", "1"),
        *("--batch", "2", "--dtype", "bfloat16", "--json", "--out", tmp_path / "new" / "folder"),
    )
    report = json.loads(done.stdout)
    assert report["options"]["kinds"] == ["sdpa", "relu", "cosformer"]
    assert report["options"]["lengths"] == [8, 32] and report["options"]["dtype"] == "bfloat16"
    assert len(report["points"]) == 3 * 2 * 2 * 2
    assert all(p["causal"] and p["pass"] == "forward" for p in report["points"])
    assert [peak["threads"] for peak in report["peaks"]] == [1, 2]
    names = {path.name for path in (tmp_path / "new" / "folder").glob("*.png")}
    assert names == {
        f"{what}-d{dim}-t{threads}.png"
        for what in ("time", "memory")
        for dim in (8, 16)
        for threads in (1, 2)
    }


def test_points_beyond_the_budget_are_left_out(program):
    done = program.ok(
        *("bench", "--kinds", "softmax,linear", "--lengths", "64,65536", "--heads", "1"),
        *("--passes", "forward", "--causal", "--threads", "1", "--seconds", "4", "--json"),
    )
    report = json.loads(done.stdout)
    for kind in ("sdpa", "softmax"):
        point = points(report, kind=kind, length=65536)[0]
        assert "no time for it in --seconds 4" in point["left_out"]
        assert point["predicted_seconds"] > 0.1
        assert "left_out" not in points(report, kind=kind, length=64)[0]
    assert report["complete"]


def test_ctrl_c_keeps_what_was_measured(program, tmp_path):
    out = tmp_path / "bench"
    process = program.start(
        *("bench", "--lengths", "16,1024,2048,4096,8192", "--heads", "2", "--out", out),
        *("--kinds", "softmax,cosformer", "--threads", "1", "--seconds", "300"),
    )
    end = time.monotonic() + 60
    while not (out / "bench.json").exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "keeping what was measured" in stderr and "stopped" in stderr
    report = json.loads((out / "bench.json").read_text())
    assert not report["complete"]
    assert "left_out" not in points(report, kind="cosformer", length=16)[0]
    assert points(report, kind="cosformer", length=8192)[0]["left_out"] == "not reached"
    assert "forward, causal" in stdout
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)
    program.ok("advise", "--length", "64", "--bench", out)


def test_a_bar_on_a_terminal(program):
    command = [str(PROGRAM), "bench", "--kinds", "linear", "--lengths", "16,32,64", "--heads", "1"]
    command += ["--passes", "forward", "--causal", "--seconds", "5"]
    status, output = on_terminal(command, 100, program.folder)
    assert status == 0, output
    drawings = re.findall(r"\r([^\r\n]*)\x1b\[K", output)
    assert any("point 1/6" in drawing and "─" in drawing for drawing in drawings), output
    assert all(len(drawing) < 100 for drawing in drawings)


WRONG = {
    "unknown kind": (("--kinds", "cosfromer"), "did you mean cosformer?"),
    "a kind twice": (("--kinds", "relu,relu"), "relu twice"),
    "length 0": (("--lengths", "64,0"), "lengths: found 0"),
    "length -1": (("--lengths", "-1"), "lengths: found -1"),
    "length by letters": (("--lengths", "many"), "--lengths"),
    "head dim": (("--head-dims", "4096"), "head-dims: found 4096"),
    "pass": (("--passes", "sideways"), 'passes: found "sideways"'),
    "dtype": (("--dtype", "int8"), 'dtype: found "int8"'),
    "seconds": (("--seconds", "0"), "seconds: found 0"),
    "threads": (("--threads", "0"), "threads: found 0"),
    "window": (("--window", "0"), "window: found 0"),
    "both forms": (("--causal", "--no-causal"), "--causal"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_of_bench(program, name):
    arguments, part = WRONG[name]
    before = fingerprint(program.folder)
    check_error(program("bench", *arguments), 2, part)
    assert fingerprint(program.folder) == before


def test_a_folder_that_cannot_be(program, tmp_path):
    (tmp_path / "file").write_text("")
    check_error(program("bench", "--out", tmp_path / "file"), 1, str(tmp_path / "file"), "folder")


def test_advice_from_a_saved_bench(program, measured):
    arguments = ("--length", "64", "--head-dim", "16", "--heads", "4", "--layers", "3")
    arguments += ("--bench", measured[0])
    text = program.ok("advise", *arguments).stdout
    for part in ("for 64 tokens, causal, 4 heads of 16, 3 layers", "\n  use ", "gives up"):
        assert part in text
    for part in ("rule of thumb", "Speed is not quality", "docs/training.md", "no causal form"):
        assert part in text
    assert "in proportion from the 2 heads" in text
    same = program.ok("advise", *arguments[:-1], measured[0] / "bench.json").stdout
    assert same == text
    advice = json.loads(program.ok("advise", *arguments, "--json").stdout)
    assert [each["kind"] for each in advice["kinds"]] == KINDS
    chosen = [each for each in advice["kinds"] if each["kind"] == advice["kind"]][0]
    assert chosen["excluded"] is None and chosen["training"]["seconds"] > 0
    assert not chosen["training"]["extrapolated"]
    # Keys and values of 64 tokens, 3 layers; of a window of 8, itself included.
    of = {each["kind"]: each for each in advice["kinds"]}
    assert of["softmax"]["state_bytes"] == 64 * 2 * 4 * 16 * 4 * 3
    assert of["window"]["state_bytes"] == 9 * 2 * 4 * 16 * 4 * 3
    assert of["linear"]["state_bytes"] == 4 * 16 * 17 * 4 * 3
    assert advice["rule_of_thumb"] == "softmax"


def test_advice_on_decoding_memory_and_encoders(program, measured):
    arguments = ("advise", "--head-dim", "16", "--bench", measured[0], "--json")
    decoding = json.loads(
        program.ok(*arguments, "--length", "1024", "--decode", "--memory", "1M").stdout
    )
    of = {each["kind"]: each for each in decoding["kinds"]}
    assert "does not fit" in of["softmax"]["excluded"] and of["linear"]["excluded"] is None
    assert of["softmax"]["decode"]["extrapolated"]
    encoder = json.loads(program.ok(*arguments, "--length", "64", "--no-causal").stdout)
    of = {each["kind"]: each for each in encoder["kinds"]}
    assert of["linformer"]["excluded"] is None and of["linformer"]["training"]["seconds"] > 0
    assert of["softmax"]["decode"] is None


def test_advice_measured_here(program):
    done = program.ok(
        *("advise", "--length", "48", "--head-dim", "8", "--heads", "1", "--seconds", "2"),
        *("--window", "16", "--num-features", "16"),
    )
    assert "measuring this machine; nothing of it is kept" in done.stderr
    assert "for 48 tokens, causal" in done.stdout and "\n  use " in done.stdout


BAD_ADVICE = {
    "no length": ((), "--length"),
    "length 0": (("--length", "0"), "length: found 0"),
    "head dim": (("--length", "64", "--head-dim", "128", "--bench", "bench"), "only 16"),
    "threads": (
        ("--length", "64", "--head-dim", "16", "--threads", "7", "--bench", "bench"),
        "7 threads, only with 1",
    ),
    "dtype": (("--length", "64", "--dtype", "float64", "--bench", "bench"), "float32"),
    "an encoder's decoding": (("--length", "64", "--no-causal", "--decode"), "decode"),
    "both forms": (("--length", "64", "--causal", "--no-causal"), "--causal"),
    "memory": (("--length", "64", "--memory", "much"), "--memory"),
    "threads -1": (("--length", "64", "--threads", "-1"), "threads: found -1"),
    "no path of a bench": (("--length", "64", "--bench", ""), 'bench: found ""'),
    "far beyond what is measured": (
        ("--length", "100000000"),
        "expected at most 262144, 16 times the longest",
    ),
    "far beyond what was measured": (
        ("--length", "1025", "--head-dim", "16", "--bench", "bench"),
        "expected at most 1024, 16 times the longest measured, 64",
    ),
    "a saved bench with another window": (
        ("--length", "64", "--window", "9", "--bench", "bench"),
        "--bench",
    ),
}


@pytest.mark.parametrize("name", BAD_ADVICE)
def test_wrong_use_of_advise(program, measured, name):
    arguments, part = BAD_ADVICE[name]
    check_error(program("advise", *arguments), 2, part)


def test_a_malformed_bench_names_the_key(program, measured, tmp_path):
    report = json.loads((measured[0] / "bench.json").read_text())
    path = tmp_path / "bench.json"

    def advise(text):
        path.write_text(text)
        return program("advise", "--length", "64", "--head-dim", "16", "--bench", path)

    report["points"][2]["seconds"] = "fast"
    check_error(advise(json.dumps(report)), 1, str(path), "points[2].seconds", '"fast"', "a number")
    del report["points"][2]["seconds"]
    check_error(advise(json.dumps(report)), 1, "points[2].seconds: missing")
    check_error(advise('{"format_version": 2}'), 1, "format_version: found 2, expected 1")
    check_error(advise("{"), 1, str(path), "not JSON")
    check_error(program("advise", "--length", "64", "--bench", tmp_path / "no"), 1, "no")
