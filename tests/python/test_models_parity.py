"""Python and C++ models held together: values, gradients, files, messages and generated text.

tests/parity/model_values.cc loads a folder that Python wrote, computes, and saves it again.
"""

import dataclasses
import json
import os
import random
import subprocess
import sys

import cosformer
import pytest
import tomllib
import torch
from conftest import ROOT
from cosformer.models import ModelConfig, Transformer
from golden_models import MAPPINGS, golden_model
from helpers import relative
from model_helpers import ALL, small_config
from safetensors.torch import load_file, save_file

BUILD = ROOT / os.environ.get("COSFORMER_BUILD", "build/release")
MODEL_VALUES = BUILD / "tests" / "parity" / "model_values"
PROGRAM = BUILD / "cli" / "cosformer"
SHIPPED = sorted((ROOT / "configs").rglob("*.toml"))

# Relative norms of differences. Both run the same kernels: logits came out bit for bit the same
# where this was written. A gradient is a sum of parts, which the two add in different orders.
LOGITS = {torch.float32: 1e-6, torch.float64: 1e-14}
GRADIENTS = {torch.float32: 2e-6, torch.float64: 1e-14}


def run(*command):
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def shipped_config(path):
    """[model] of a run's config; its vocab_size comes from the tokenizer (65 characters)."""
    with path.open("rb") as file:
        model = tomllib.load(file)["model"]
    return ModelConfig.from_dict({**model, "vocab_size": 65})


CONFIGS = {
    **ALL,
    **{str(path.relative_to(ROOT / "configs")): shipped_config(path) for path in SHIPPED},
    **{f"golden {name}": golden_model(name).config for name in MAPPINGS},
}


def inputs_of(config, is_masked, dtype, count=20):
    ids = torch.randint(config.vocab_size, (2, count))
    inputs = {"ids": ids, "weights": torch.randn(2, count, config.vocab_size, dtype=dtype)}
    if is_masked:
        inputs["key_mask"] = torch.arange(count).expand(2, -1) < torch.tensor([[count], [13]])
    return inputs


def values_of(model, inputs):
    logits = model(inputs["ids"], key_mask=inputs.get("key_mask"))
    (logits * inputs["weights"]).sum().backward()
    return {
        "logits": logits.detach(),
        **{f"grad.{n}": p.grad for n, p in model.named_parameters() if p.grad is not None},
    }


class Case:
    def __init__(self, name, config, folder, dtype):
        is_shipped = name.endswith(".toml")
        self.name, self.folder, self.dtype = name, folder, dtype
        is_golden = name.startswith("golden ")
        model = golden_model(name.split()[1]) if is_golden else Transformer(config)
        self.model = model.to(dtype).eval()
        self.model.save_pretrained(folder)
        count = min(config.max_len, 70) if is_shipped else 20  # over a chunk of a kernel
        self.inputs = inputs_of(config, not is_shipped, dtype, count)
        save_file(self.inputs, folder / "inputs.safetensors")


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Every config in both types, computed by C++ in one process."""
    torch.manual_seed(2)
    out = {}
    for name, config in CONFIGS.items():
        for dtype in (torch.float32, torch.float64):
            folder = tmp_path_factory.mktemp("model")
            out[name, dtype] = Case(name, config, folder, dtype)
    lines = run(MODEL_VALUES, *(case.folder for case in out.values())).splitlines()
    assert lines == ["ok"] * len(out)
    return out


def test_every_shipped_config_is_there():
    assert len(SHIPPED) >= 10 and any(path.name == "demo.toml" for path in SHIPPED)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_are_those_of_cpp(cases, name):
    for dtype in (torch.float32, torch.float64):
        case = cases[name, dtype]
        expected = load_file(case.folder / "values.safetensors")
        found = values_of(case.model, case.inputs)
        assert relative(found["logits"], expected["logits"]) < LOGITS[dtype]
        assert found.keys() == expected.keys()
        # A gradient that is 0 but for rounding (a key's bias under softmax) is measured against
        # the others.
        size = max(value.norm() for key, value in expected.items() if key != "logits")
        for key, value in expected.items():
            floor = 0.1 * float(size)
            off = float((found[key] - value).norm()) / max(float(value.norm()), floor)
            assert off < GRADIENTS[dtype], (key, off)


@pytest.mark.parametrize("name", CONFIGS)
def test_behaviour_38_parameters_pass_from_python_to_cpp_and_back_bit_exactly(cases, name):
    for dtype in (torch.float32, torch.float64):
        case = cases[name, dtype]
        saved = case.folder / "saved"
        # C++ writes the same text.
        text = (case.folder / "config.json").read_text()
        assert (saved / "config.json").read_text() == text
        there = case.model.state_dict()
        back = Transformer.from_pretrained(saved)
        assert back.config == case.model.config
        state = back.state_dict()
        assert list(state) == list(there)
        for key, value in there.items():
            assert state[key].dtype == dtype and torch.equal(state[key], value), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_behaviour_38_half_types_pass_bit_exactly(tmp_path, dtype):
    model = Transformer(small_config()).to(dtype)
    model.save_pretrained(tmp_path)
    save_file(inputs_of(model.config, False, dtype), tmp_path / "inputs.safetensors")
    assert run(MODEL_VALUES, tmp_path) == "ok\n"
    back = Transformer.from_pretrained(tmp_path / "saved").state_dict()
    for key, value in model.state_dict().items():
        assert back[key].dtype == dtype and torch.equal(back[key], value), key


BAD_CONFIGS = [
    {"emed_dim": 128},
    {"Num_Layers": 1},
    {"layers": 1},
    {"zzzzzz": 1},
    {"rope-base": 1, "embed": 2},
    {"embed_dim": "128"},
    {"embed_dim": 128.5},
    {"embed_dim": True},
    {"embed_dim": None},
    {"embed_dim": 0},
    {"max_len": 99999999999999},
    {"gated": 1},
    {"dropout": 1.5},
    {"init_std": -1},
    {"norm": "layer_norm"},
    {"norm": 3},
    {"norm": "a\u00e9" * 3},
    {"format_version": 2, "new_key": 1},
    {"format_version": 0},
    {"format_version": "1"},
    {"attention": 3},
    {"attention": None},
    {"attention": []},
    {"attention": {"kinds": "softmax"}},
    {"attention": [{"kind": "softmax"}, {"kind": "sofmax"}]},
    {"attention": {"eps": 0}},
    {"vocab_size": 0},
    {"num_heads": 5},
    {"num_kv_heads": 3},
    {"num_kv_heads": -1},
    {"attention": [{}, {}, {}]},
    {"attention": {"scale": 0.5}},
    {"attention": {"dropout": 0.1}},
    {"attention": {"orthogonal": False}},
    {"attention": {"reweight_len": 100}},
    {"attention": {"feature_map": "identity"}},
    {"attention": {"kind": "softmax", "feature_map": "relu"}},
    {"attention": [{}, {}, {"kind": "softmax", "eps": 1e-3}, {}]},
    {"rope_base": 500},
    {"rope_interleaved": True},
    {"max_distance": 5},
    {"position": "rope", "position_offset": 2},
    {"position": "rope", "head_dim": 33},
    {"position": "rope", "rope_dim": 64},
    {"position": "rope", "rope_dim": 16},
    {"position": "rope", "is_causal": False, "attention": {"kind": "linformer"}},
    {"position": "t5"},
    {"position": "t5", "max_distance": 16, "attention": {"kind": "softmax"}},
    {"position": "t5", "relative_buckets": 7, "is_causal": False, "attention": {"kind": "softmax"}},
    {"position": "t5", "is_causal": False, "attention": {"kind": "linformer"}},
    {"attention": {"kind": "softmax", "dilation": 2}},
    {"attention": {"kind": "longformer"}},
    {"attention": {"kind": "bigbird", "window_blocks": 2}},
    {"attention": {"kind": "bigbird", "window": 4}},
    {"attention": {"kind": "linformer"}},
    {"is_causal": False, "attention": {"kind": "linformer", "projected_len": 257}},
    {
        "is_causal": False,
        "num_kv_heads": 2,
        "attention": {"kind": "linformer", "one_kv_head": True},
    },
    {"cross_attention": True},
    {"num_decoder_layers": 2},
    {"type_vocab_size": 2},
]


def misspelt_keys(count):
    """Keys with a few letters changed, left out, doubled or swapped."""
    draw = random.Random(3)
    keys = [field.name for field in dataclasses.fields(ModelConfig)]
    out = []
    while len(out) < count:
        key = list(draw.choice(keys))
        for _ in range(draw.randint(1, 5)):
            at = draw.randrange(len(key) - 1)
            change = draw.randrange(4)
            if change == 0:
                key[at] = draw.choice("abexyz_-Q")
            elif change == 1 and len(key) > 3:
                del key[at]
            elif change == 2:
                key.insert(at, key[at])
            else:
                key[at], key[at + 1] = key[at + 1], key[at]
        if "".join(key) not in keys:
            out.append("".join(key))
    return out


def test_both_say_the_same_of_a_bad_folder(tmp_path):
    """The message of every bad config, and of bad tensors, word for word."""
    folders = []

    def add(config, tensors):
        folder = tmp_path / str(len(folders))
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
        folders.append(folder)

    for changes in [*BAD_CONFIGS, *({key: 1} for key in misspelt_keys(100))]:
        add({"vocab_size": 65, **changes}, {})
    good = small_config(tie_embeddings=False)
    whole = dict(Transformer(good).state_dict())
    for changes in (
        {"final_norm.bias": None},
        {"head.weight": None, "head.weights": torch.ones(11, 16)},
        {"more": torch.ones(2)},
        {"more": torch.ones(2), "and_more": torch.ones(1)},
        {"embed.weight": torch.ones(11, 15)},
        {"head.weight": torch.ones(11, 16, dtype=torch.float64)},
        {"head.weight": torch.ones(11, 16, dtype=torch.int32)},
    ):
        tensors = {key: value for key, value in {**whole, **changes}.items() if value is not None}
        add(good.to_dict(), tensors)
    lines = run(MODEL_VALUES, *folders).splitlines()
    assert len(lines) == len(folders)
    for folder, expected in zip(folders, lines, strict=True):
        with pytest.raises((ValueError, NotImplementedError)) as caught:
            Transformer.from_pretrained(folder)
        assert str(caught.value) == expected


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A model of bytes, whose next tokens differ well."""
    folder = tmp_path_factory.mktemp("bytes")
    torch.manual_seed(4)
    config = small_config(["cosformer", "softmax"], vocab_size=256, max_len=64)
    Transformer(config).save_pretrained(folder, tokenizer="bytes")
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 1.0, "seed": 12345678901234567890, "top_k": 5},
        {"temperature": 1.3, "seed": 5, "top_p": 0.8},
        {"temperature": 0.7, "seed": 6, "top_k": 20, "top_p": 0.9, "rolling": True},
    ],
)
def test_the_program_writes_the_same_tokens(written, options):
    count = 150 if options.get("rolling") else 40
    model = Transformer.from_pretrained(written)
    prompt = "The cosine"
    found = cosformer.generate(model, list(prompt.encode()), max_new_tokens=count, **options)
    flags = []
    for key, value in options.items():
        flags += ["--rolling"] if key == "rolling" else [f"--{key.replace('_', '-')}", value]
    out = run(PROGRAM, "generate", written, "--prompt", prompt, "--tokens", count, "--json", *flags)
    assert json.loads(out)["tokens"] == found[0].tolist()


def test_the_example_trains_and_the_program_reads_its_folder(tmp_path):
    text = ROOT / "include" / "cosformer" / "nn.h"
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "train_char_lm.py", text, tmp_path / "lm"]
        + ["--steps", "60", "--batch", "8"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    losses = [
        float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step ")
    ]
    assert losses[0] > 5 and losses[-1] < 3.5
    out = run(
        PROGRAM, "generate", tmp_path / "lm", "--prompt", "// ", "--temperature", "0", "--json"
    )
    model = Transformer.from_pretrained(tmp_path / "lm")
    tokens = json.loads(out)["tokens"]
    found = cosformer.generate(model, list(b"// "), max_new_tokens=200, temperature=0.0)
    assert tokens == found[0].tolist()
