"""The definition of linear attention, weight by weight, and inputs to try it on."""

import json
import math
import struct
from pathlib import Path

import torch

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
PYTHON = Path(__file__).resolve().parents[2] / "python"


def golden(name):
    """Tensors and metadata of tests/golden/<name>.safetensors."""
    from safetensors.torch import load

    data = (GOLDEN / f"{name}.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    return load(data), {key: json.loads(value) for key, value in metadata.items() if key != "ran"}


def relative(found, expected):
    """Norm of the difference over the norm of what is expected."""
    found, expected = found.detach().double(), expected.detach().double()
    assert found.shape == expected.shape
    norm = expected.norm()
    return ((found - expected).norm() / norm if norm > 0 else (found - expected).norm()).item()


def off_by(found, expected, scale):
    """Norm of the difference, over the norm of what is expected and of scale (what it is made of):
    for values that cancel to nearly nothing."""
    found, expected = found.detach().double(), expected.detach().double()
    assert found.shape == expected.shape
    size = expected.norm() + scale.detach().double().norm()
    return ((found - expected).norm() / size.clamp_min(1e-300)).item()


def inputs(
    batch=2,
    q_len=7,
    kv_len=None,
    heads=2,
    kv_heads=None,
    dim=4,
    value_dim=None,
    dtype=torch.float64,
):
    kv_len = q_len if kv_len is None else kv_len
    kv_heads = kv_heads or heads
    return (
        torch.randn(batch, q_len, heads, dim, dtype=dtype),
        torch.randn(batch, kv_len, kv_heads, dim, dtype=dtype),
        torch.randn(batch, kv_len, kv_heads, value_dim or dim, dtype=dtype),
    )


def _phi(x, feature_map):
    if feature_map == "relu":
        return x.relu()
    return torch.nn.functional.elu(x) + 1 if feature_map == "elu1" else x


def _rotate(x, positions, base, interleaved):
    half = x.shape[-1] // 2
    angles = positions[..., None] * base ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]
    out = torch.empty_like(x)
    a, b = (
        (slice(0, None, 2), slice(1, None, 2))
        if interleaved
        else (slice(0, half), slice(half, None))
    )
    out[..., a] = x[..., a] * cos - x[..., b] * sin
    out[..., b] = x[..., b] * cos + x[..., a] * sin
    return out


def definition(
    q,
    k,
    v,
    *,
    feature_map="relu",
    reweight_len=None,
    is_causal=False,
    q_start=0,
    kv_start=0,
    key_mask=None,
    query_mask=None,
    normalizer="sum",
    rotary_base=None,
    rotary_interleaved=False,
    eps=1e-6,
):
    """out_i = sum_j w_ij v_j / max(sum_j w_ij, eps), in double, quadratic."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    batch, q_len, kv_len = q.shape[0], q.shape[1], k.shape[1]
    i = torch.as_tensor(q_start).expand(batch)[:, None] + torch.arange(q_len)
    j = torch.as_tensor(kv_start).expand(batch)[:, None] + torch.arange(kv_len)
    visible = torch.ones(batch, q_len, kv_len, dtype=torch.bool)
    if is_causal:
        visible &= j[:, None, :] <= i[:, :, None]
    if key_mask is not None:
        visible &= key_mask[:, None, :]
    factor = visible.double()
    if reweight_len is not None:
        distance = (i[:, :, None] - j[:, None, :]).double()
        factor *= (distance * (math.pi / 2 / reweight_len)).cos()
    fq, fk = _phi(q, feature_map), _phi(k, feature_map)
    w = torch.einsum("bihd,bjhd->bhij", fq, fk) * factor[:, None]
    numerator = w
    if rotary_base is not None:
        rq, rk = (_rotate(t, p, rotary_base, rotary_interleaved) for t, p in ((fq, i), (fk, j)))
        numerator = torch.einsum("bihd,bjhd->bhij", rq, rk) * factor[:, None]
    out = torch.einsum("bhij,bjhd->bihd", numerator, v)
    if normalizer == "sum":
        out = out / w.sum(-1).clamp_min(eps).permute(0, 2, 1)[..., None]
    if query_mask is not None:
        out = out * query_mask[:, :, None, None]
    return out


def gradients(function, tensors, grad=None):
    """Output and gradients of sum(output * grad) by each tensor."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = function(*leaves)
    out.backward(torch.ones_like(out) if grad is None else grad)
    return out.detach(), [leaf.grad for leaf in leaves]
