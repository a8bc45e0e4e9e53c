"""The shipped recipe runs: every config has its logged curve, and the curve ends in its band."""

import importlib.util
import json
import pathlib

import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "configs" / "shakespeare"
spec = importlib.util.spec_from_file_location("reproduce", FOLDER / "reproduce.py")
reproduce = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reproduce)


def test_every_config_is_a_recipe():
    assert {path.stem for path in FOLDER.glob("*.toml")} == set(reproduce.REFERENCE)


@pytest.mark.parametrize("name", sorted(reproduce.REFERENCE))
def test_curve_ends_in_its_band(name):
    curve = FOLDER / "curves" / f"{name}.jsonl"
    lines = [json.loads(line) for line in curve.read_text().splitlines()]
    evaluations = [line for line in lines if line["type"] == "eval"]
    assert evaluations[-1]["step"] == 2000
    assert evaluations[-1]["loss"] <= reproduce.REFERENCE[name] + reproduce.TOLERANCE
    # A curve that falls: each quarter of the run is below the one before.
    losses = [line["loss"] for line in evaluations]
    assert all(later < earlier for earlier, later in zip(losses[1::2], losses[3::2], strict=False))
