"""Public modules' parameters in our layers: their outputs and gradients (tests/golden)."""

import cosformer
import pytest
import torch
from helpers import golden, relative

OUT, GRAD = 3e-6, 1e-5


def compare(layer, out, tensors, inputs, names):
    """names: ours by theirs."""
    assert relative(out, tensors["out"]) <= OUT
    ours = dict(layer.named_parameters())
    leaves = {**inputs, **{theirs: ours[name] for theirs, name in names.items()}}
    out.backward(tensors["grad_out"])
    for theirs, leaf in leaves.items():
        if f"d{theirs}" not in tensors:  # without global tokens, their projections
            assert leaf.grad is None or (leaf.grad == 0).all(), theirs
            continue
        expected = tensors[f"d{theirs}"]
        if expected.norm() < 1e-6 * tensors["grad_out"].norm():
            # A key's bias shifts every softmax score of a row alike.
            assert leaf.grad.norm() <= 1e-5 * tensors["grad_out"].norm(), theirs
        else:
            assert relative(leaf.grad, expected) <= GRAD, theirs


@pytest.mark.parametrize("number", [0, 1])
def test_cosformer_module(number):
    tensors, meta = golden(f"cosformer_module_{number}")
    layer = cosformer.nn.CosformerAttention(
        24, meta["num_heads"], reweight_len=meta["reweight_len"], is_causal=meta["is_causal"]
    )
    # The public module's state_dict, unchanged.
    state = {
        f"{name}_proj.{part}": tensors[f"{name}_proj.{part}"]
        for name in ("k", "v", "q", "out")
        for part in ("weight", "bias")
    }
    layer.load_state_dict(state, strict=True)
    inputs = {name: tensors[name].requires_grad_() for name in ("query", "key", "value")}
    # Theirs has the sequence first.
    out = layer(*(x.transpose(0, 1) for x in inputs.values())).transpose(0, 1)
    compare(layer, out, tensors, inputs, {name: name for name in state})


@pytest.mark.parametrize("number", range(4))
def test_linformer_module(number):
    tensors, meta = golden(f"linformer_module_{number}")
    options = {name: meta[name] for name in ("max_len", "projected_len", "share_kv", "one_kv_head")}
    layer = cosformer.nn.LinformerAttention(24, meta["num_heads"], qkv_bias=False, **options)
    names = {
        "proj_k": "key_len_proj",
        "proj_v": "value_len_proj",
        "to_q.weight": "q_proj.weight",
        "to_k.weight": "k_proj.weight",
        "to_v.weight": "v_proj.weight",
        "to_out.weight": "out_proj.weight",
        "to_out.bias": "out_proj.bias",
    }
    names = {theirs: ours for theirs, ours in names.items() if theirs in tensors}
    layer.load_state_dict({ours: tensors[theirs] for theirs, ours in names.items()}, strict=True)
    x = tensors["x"].requires_grad_()
    compare(layer, layer(x), tensors, {"x": x}, names)


@pytest.mark.parametrize("number", range(3))
def test_longformer_module(number):
    tensors, meta = golden(f"longformer_module_{number}")
    layer = cosformer.nn.LongformerAttention(
        24, meta["num_heads"], window=meta["one_sided_window"], out_proj=False
    )
    names = {
        f"{theirs}{infix}.{part}": f"{theirs[0]}{infix}_proj.{part}"
        for theirs in ("query", "key", "value")
        for infix in ("", "_global")
        for part in ("weight", "bias")
    }
    layer.load_state_dict({ours: tensors[theirs] for theirs, ours in names.items()}, strict=True)
    x = tensors["x"].requires_grad_()
    masks = {name: tensors[name].bool() for name in ("key_mask", "global_mask")}
    compare(layer, layer(x, **masks), tensors, {"x": x}, names)


@pytest.mark.parametrize("form", ["noncausal", "causal"])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("kind", ["linear", "performer"])
def test_public_functions_through_a_layer(kind, form, number):
    """Identity projections around heads: the layer passes on what the functions compute."""
    tensors, meta = golden(f"{kind}_{form}_{number}")
    batch, length, heads, dim = tensors["q"].shape
    width = heads * dim
    options = {"is_causal": meta["is_causal"], "qkv_bias": False, "out_proj": False}
    if kind == "performer":
        options["num_features"] = meta["num_features"]
    layer = cosformer.nn.attention(kind, width, heads, **options)
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
            projection.weight.copy_(torch.eye(width))
        if kind == "performer":
            layer.projection.copy_(tensors["projection"])
    leaves = [tensors[name].flatten(2).requires_grad_() for name in "qkv"]
    masks = {}
    if "key_mask" in tensors:
        masks["key_mask"] = tensors["key_mask"].bool()
    out = layer(*leaves, **masks)
    assert relative(out, tensors["out"].flatten(2)) <= 1e-5  # a peer that ran in float32
    out.backward(tensors["grad_out"].flatten(2))
    for leaf, name in zip(leaves, ("dq", "dk", "dv"), strict=True):
        assert relative(leaf.grad, tensors[name].flatten(2)) <= GRAD
