"""Parity with what public implementations compute (tests/golden)."""

import cosformer
import pytest
import torch
from helpers import GOLDEN, golden, gradients, off_by, relative

FILES = sorted(p.stem for p in GOLDEN.glob("*.safetensors"))
PEERS = (
    "cosformer_causal",
    "cosformer_noncausal",
    "cosformer_cross",
    "linear_",
    "softmax_",
    "bigbird_",
)
# Those of Performer, whose tolerances are its own, are in test_performer.py.
ATTENTION = [
    name
    for name in FILES
    if name.startswith((*PEERS, "naive_")) and not name.startswith("naive_performer")
]


def call_of(metadata, tensors):
    """The public call that a golden file describes, as a function of q, k, v and (where it has a
    gradient) the relative bias."""
    kind = metadata.get("kind")
    if "call" in metadata:
        kwargs = dict(metadata["kwargs"])
        kwargs.update({name: tensors[name] for name in metadata["tensors"]})
        function = getattr(cosformer, metadata["call"])
    elif kind == "cosformer":
        kwargs = {key: metadata[key] for key in ("is_causal", "reweight_len", "eps")}
        function = cosformer.cosformer_attention
    elif kind == "softmax":
        kwargs = {"is_causal": metadata["is_causal"]}
        function = cosformer.softmax_attention
    elif kind == "bigbird":
        kwargs = {
            "block_mask": tensors["block_mask"],
            "block_size": metadata["block_size"],
            "key_mask": tensors["key_mask"],
            "query_mask": tensors["key_mask"],
        }
        function = cosformer.softmax_attention
    else:
        assert kind == "linear" and metadata["feature_map"] == "elu+1"
        kwargs = {
            "feature_map": "elu1",
            "is_causal": metadata["is_causal"],
            "eps": metadata["eps"],
            "key_mask": tensors["key_mask"],
        }
        function = cosformer.linear_attention

    def call(q, k, v, *bias):
        named = {"relative_bias": bias[0]} if bias else {}
        return function(q, k, v, **{**kwargs, **named})

    return call


def test_there_are_golden_files():
    assert len(ATTENTION) == 39


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name, dtype):
    tensors, metadata = golden(name)
    q, k, v, grad = (tensors[key].to(dtype) for key in ("q", "k", "v", "grad_out"))
    leaves, keys = [q, k, v], ["dq", "dk", "dv"]
    if "drelative_bias" in tensors:
        leaves.append(tensors["relative_bias"].to(dtype))
        keys.append("drelative_bias")
    out, found = gradients(call_of(metadata, tensors), leaves, grad)
    assert out.dtype == dtype
    # The peer of linear_causal ran in float32.
    single = dtype == torch.float32 or name.startswith("linear_causal")
    out_limit, grad_limit = (3e-6, 1e-5) if single else (3e-7, 1e-6)
    if name.startswith("linear_causal"):
        out_limit = 1e-5
    assert relative(out, tensors["out"]) <= out_limit
    for gradient, key in zip(found, keys, strict=True):
        assert relative(gradient, tensors[key]) <= grad_limit, key


def run_module(name, dtype, forward):
    """Output and every gradient of a module file whose layers are `forward` of its parameters."""
    tensors, metadata = golden(name)
    names = ["x"] + [
        key
        for key in tensors
        if key.endswith((".weight", ".bias")) and not key.startswith("d") or key.startswith("proj_")
    ]
    leaves = {key: tensors[key].to(dtype).requires_grad_() for key in names}
    out = forward(leaves, tensors, metadata)
    out.backward(tensors["grad_out"].to(dtype))
    out_limit, grad_limit = (3e-6, 1e-5) if dtype == torch.float32 else (3e-7, 1e-6)
    assert relative(out, tensors["out"]) <= out_limit
    compared = [key for key in names if f"d{key}" in tensors]
    assert len(compared) >= 6
    for key in compared:
        # A shift of all keys changes no weight: the gradient of their bias is 0 but for rounding.
        nothing = key in ("key.bias", "key_global.bias")
        scale = leaves[key.replace("bias", "weight")].grad if nothing else torch.zeros(1)
        assert off_by(leaves[key].grad, tensors[f"d{key}"], scale) <= grad_limit, key
    # What the peer has no gradient of (global projections without a global token) has none here.
    for key in set(names) - set(compared):
        grad = leaves[key].grad
        assert grad is None or not grad.any(), key


def heads_of(x, weight, bias, num_heads, head_dim):
    return torch.nn.functional.linear(x, weight, bias).unflatten(-1, (num_heads, head_dim))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("number", range(4))
def test_linformer(number, dtype):
    def forward(p, tensors, metadata):
        heads = metadata["num_heads"]
        dim = p["to_q.weight"].shape[0] // heads
        kv_heads = p["to_k.weight"].shape[0] // dim
        q = heads_of(p["x"], p["to_q.weight"], None, heads, dim)
        k = heads_of(p["x"], p["to_k.weight"], None, kv_heads, dim)
        shared = metadata["share_kv"]
        v = k if shared else heads_of(p["x"], p["to_v.weight"], None, kv_heads, dim)
        proj_v = p["proj_k"] if shared else p["proj_v"]
        out = cosformer.linformer_attention(q, k, v, p["proj_k"], proj_v)
        return torch.nn.functional.linear(out.flatten(2), p["to_out.weight"], p["to_out.bias"])

    run_module(f"linformer_module_{number}", dtype, forward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("number", range(3))
def test_longformer(number, dtype):
    def forward(p, tensors, metadata):
        heads = metadata["num_heads"]
        dim = p["query.weight"].shape[0] // heads
        q, k, v, qg, kg, vg = (
            heads_of(p["x"], p[f"{name}.weight"], p[f"{name}.bias"], heads, dim)
            for name in ("query", "key", "value", "query_global", "key_global", "value_global")
        )
        side = metadata["one_sided_window"]
        out = cosformer.longformer_attention(
            q,
            k,
            v,
            qg,
            kg,
            vg,
            window=(side, side),
            global_mask=tensors["global_mask"],
            key_mask=tensors["key_mask"],
            query_mask=tensors["key_mask"],
        )
        return out.flatten(2)

    run_module(f"longformer_module_{number}", dtype, forward)


@pytest.mark.parametrize("name", ["t5_bias_bidirectional", "t5_bias_causal"])
def test_t5_bias(name):
    tensors, metadata = golden(name)
    weight = tensors["weight"].double().requires_grad_()
    reach = metadata["max_distance"]
    table = cosformer.t5_relative_bias(
        weight, bidirectional=metadata["bidirectional"], max_distance=reach
    )
    assert table.shape == (weight.shape[1], 2 * reach + 1)
    place = torch.arange(tensors["bias"].shape[-1])
    index = (place[None, :] - place[:, None]).clamp(-reach, reach) + reach
    assert torch.equal(table[:, index].float(), tensors["bias"])
    # Its gradient counts the entries of each bucket.
    table[:, index].sum().backward()
    count = torch.bincount(tensors["buckets"].flatten().long(), minlength=weight.shape[0])
    assert torch.equal(weight.grad, count.double()[:, None].expand_as(weight))


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
