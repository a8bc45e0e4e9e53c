"""Parity with what public implementations compute (tests/golden)."""

import cosformer
import pytest
import torch
from helpers import GOLDEN, golden, gradients, relative

FILES = sorted(p.stem for p in GOLDEN.glob("*.safetensors"))
ATTENTION = [
    name
    for name in FILES
    if name.startswith(("cosformer_causal", "cosformer_noncausal", "cosformer_cross", "linear_"))
    or (name.startswith("naive_") and "linear" == golden(name)[1]["call"].split("_")[0])
]


def call_of(metadata, tensors):
    """The public call that a golden file describes, as a function of q, k, v."""
    if "call" in metadata:
        kwargs = dict(metadata["kwargs"])
        kwargs.update({name: tensors[name] for name in metadata["tensors"]})
        function = getattr(cosformer, metadata["call"])
    elif metadata["kind"] == "cosformer":
        kwargs = {key: metadata[key] for key in ("is_causal", "reweight_len", "eps")}
        function = cosformer.cosformer_attention
    else:
        assert metadata["kind"] == "linear" and metadata["feature_map"] == "elu+1"
        kwargs = {
            "feature_map": "elu1",
            "is_causal": metadata["is_causal"],
            "eps": metadata["eps"],
            "key_mask": tensors["key_mask"],
        }
        function = cosformer.linear_attention
    return lambda q, k, v: function(q, k, v, **kwargs)


def test_there_are_golden_files():
    assert len(ATTENTION) == 25


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name, dtype):
    tensors, metadata = golden(name)
    q, k, v, grad = (tensors[key].to(dtype) for key in ("q", "k", "v", "grad_out"))
    out, found = gradients(call_of(metadata, tensors), (q, k, v), grad)
    assert out.dtype == dtype
    # The peer of linear_causal ran in float32.
    single = dtype == torch.float32 or name.startswith("linear_causal")
    out_limit, grad_limit = (3e-6, 1e-5) if single else (3e-7, 1e-6)
    if name.startswith("linear_causal"):
        out_limit = 1e-5
    assert relative(out, tensors["out"]) <= out_limit
    for gradient, key in zip(found, ("dq", "dk", "dv"), strict=True):
        assert relative(gradient, tensors[key]) <= grad_limit, key


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["rope_half", "rope_interleaved"])
def test_rotary(name, dtype):
    tensors, metadata = golden(name)
    options = {
        "base": float(metadata["base"]),
        "start": metadata["start"],
        "interleaved": name == "rope_interleaved",
    }
    for key in ("q", "k"):
        out = cosformer.apply_rotary(tensors[key].to(dtype), **options)
        assert out.dtype == dtype
        assert relative(out, tensors[f"{key}_rotated"]) <= (3e-7 if dtype.itemsize == 8 else 1e-6)


def test_sinusoidal():
    table = golden("sinusoidal")[0]["table"]
    assert relative(cosformer.sinusoidal_positions(*table.shape), table) <= 1e-7
