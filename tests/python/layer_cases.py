"""Attention layers in many forms, and what they compute, weight by weight in double."""

import math
from dataclasses import dataclass, field

import cosformer
import torch
from helpers import _phi, _rotate

KINDS = ("softmax", "linear", "cosformer", "performer", "linformer", "longformer", "bigbird")
EMBED, HEADS = 24, 4


def options_of(kind, is_causal=False):
    options = {
        "cosformer": {"reweight_len": 64},
        "linformer": {"max_len": 48, "projected_len": 10},
        "longformer": {"window": 3, "global_tokens": 2},
        "bigbird": {"block_size": 4, "num_random_blocks": 1, "window_blocks": 1},
    }
    return {"is_causal": is_causal, **options.get(kind, {})}


@dataclass
class Case:
    kind: str
    options: dict
    bias_reach: int = 0
    name: str = ""
    limits: dict = field(default_factory=dict)

    def layer(self, **changes):
        torch.manual_seed(7)
        return cosformer.nn.attention(self.kind, EMBED, HEADS, **{**self.options, **changes})

    def call(self, dtype=torch.float32):
        """What every call of the layer takes."""
        if self.bias_reach == 0:
            return {}
        torch.manual_seed(8)
        return {"relative_bias": torch.randn(HEADS, 2 * self.bias_reach + 1).to(dtype)}

    @property
    def is_causal(self):
        return self.options["is_causal"]

    @property
    def limit(self):
        # Performer's features are exponentials: their error is that of the exponent.
        return 1e-5 if self.kind == "performer" else 3e-6

    @property
    def grad_limit(self):
        return 5e-5 if self.kind == "performer" else 1e-5


def all_cases():
    out = []
    grouped = {"num_kv_heads": 2, "head_dim": 10, "value_dim": 7, "out_bias": False}
    for is_causal in (False, True):
        form = "_causal" if is_causal else "_full"

        def add(kind, name="", bias_reach=0, is_causal=is_causal, form=form, **options):
            options = {**options_of(kind, is_causal), **options}
            out.append(Case(kind, options, bias_reach, kind + form + name))

        rotary = {"head_dim": 8, "rotary_base": 10000.0, "rotary_interleaved": is_causal}
        for kind in KINDS:
            if kind == "linformer" and is_causal:
                continue
            add(kind)
            add(kind, "_grouped", **grouped)
            if kind != "linformer":
                add(kind, "_rotary", **rotary, qkv_bias=False)
        for kind in ("softmax", "longformer", "bigbird"):
            add(kind, "_bias", 5)
        part = {"head_dim": 8, "rotary_base": 500.0, "rotary_dim": 4}
        add("softmax", "_part_rotary", **part, scale=0.3)
        add("performer", "_part_rotary", **part)
        add("softmax", "_window", window=2, dilation=3)
        add("longformer", "_dilated", dilation=2, scale=0.4)
        wide = {"block_size": 3, "window_blocks": 3, "num_random_blocks": 2, "block_seed": 5}
        add("bigbird", "_wide", **wide, first_global_blocks=2, last_global_blocks=0)
        trained = {"trainable_projection": True, "orthogonal": False, "num_features": 17}
        add("performer", "_trainable", **trained, projection_seed=3)
        add("cosformer", "_head_norm", normalizer="none")
        add("cosformer", "_elu1", feature_map="elu1", out_proj=False)
        add("linear", "_relu", feature_map="relu")
        if not is_causal:
            add("linformer", "_shared", share_kv=True)
            add("linformer", "_one_kv_head", one_kv_head=True)
    return out


def stateful_cases():
    out = [case for case in all_cases() if case.is_causal]

    def add(name, kind, bias_reach=0, **options):
        out.append(Case(kind, {**options_of(kind, True), **options}, bias_reach, name))

    add("longformer_window_alone", "longformer", global_tokens=0, num_kv_heads=2)
    add(
        "longformer_global_rotary_grouped",
        "longformer",
        6,  # beyond the window: more is kept, and tokens are dropped before the tests end
        global_tokens=5,
        window=2,
        num_kv_heads=1,
        head_dim=8,
        value_dim=5,
        rotary_base=100.0,
    )
    add("softmax_window_rotary_bias", "softmax", 9, window=4, head_dim=8, rotary_base=100.0)
    return out


CASES = {case.name: case for case in all_cases()}
STATEFUL = {case.name: case for case in stateful_cases()}


def _heads(linear, x, heads):
    y = x.double() @ linear.weight.double().t()
    if linear.bias is not None:
        y = y + linear.bias.double()
    return y.view(*y.shape[:2], heads, -1)


def naive_layer(
    layer,
    query,
    key=None,
    value=None,
    *,
    q_start=0,
    kv_start=0,
    key_mask=None,
    query_mask=None,
    global_mask=None,
    relative_bias=None,
):
    """The layer's output by the formula of its kind, differentiable."""
    key = query if key is None else key
    value = key if value is None else value
    batch, q_len, kv_len = query.shape[0], query.shape[1], key.shape[1]
    q = _heads(layer.q_proj, query, layer.num_heads)
    k = _heads(layer.k_proj, key, layer.num_kv_heads)
    v = k if layer.v_proj is None else _heads(layer.v_proj, value, layer.num_kv_heads)
    i, j = q_start + torch.arange(q_len), kv_start + torch.arange(kv_len)
    distance = j[None] - i[:, None]
    visible = torch.ones(batch, layer.num_heads, q_len, kv_len, dtype=torch.bool)
    if layer.is_causal:
        visible &= distance <= 0
    if key_mask is not None:
        visible &= key_mask[:, None, None]

    def turned(x, positions):
        if layer.rotary_base is None:
            return x
        dim = layer.rotary_dim
        turn = _rotate(
            x[..., :dim],
            positions.expand(batch, -1).double(),
            layer.rotary_base,
            layer.rotary_interleaved,
        )
        return torch.cat([turn, x[..., dim:]], -1)

    def each_head(x):
        return x.repeat_interleave(layer.num_heads // x.shape[2], 2)

    def scores(q, k):
        s = torch.einsum("bihd,bjhd->bhij", q, each_head(k))
        s = s * (layer.head_dim**-0.5 if layer.scale is None else layer.scale)
        if relative_bias is not None:
            reach = relative_bias.shape[1] // 2
            s = s + relative_bias.double()[:, distance.clamp(-reach, reach) + reach]
        return s

    def softmax(s, visible):
        w = torch.where(visible, s, -torch.inf)
        w = (w - w.amax(-1, keepdim=True).clamp_min(-1e300)).exp()
        return w / w.sum(-1, keepdim=True).clamp_min(1e-300)

    kind = layer.kind
    if kind in ("linear", "cosformer"):
        fq, fk = _phi(q, layer.feature_map), each_head(_phi(k, layer.feature_map))
        factor = visible.double()
        if layer.reweight_len is not None:
            factor = factor * (distance * (math.pi / 2 / layer.reweight_len)).cos()
        w = torch.einsum("bihd,bjhd->bhij", fq, fk) * factor
        top = torch.einsum("bihd,bjhd->bhij", turned(fq, i), turned(fk, j)) * factor
        out = torch.einsum("bhij,bjhd->bihd", top, each_head(v))
        if layer.normalizer == "sum":
            out = out / w.sum(-1).clamp_min(layer.eps).permute(0, 2, 1)[..., None]
        else:
            out = out * (out.square().mean(-1, keepdim=True) + layer.eps).rsqrt()
    elif kind == "performer":
        w = layer.projection.double()

        def features(x):
            x = x * layer.head_dim**-0.25
            return x @ w.t() - x.square().sum(-1, keepdim=True) / 2

        logs = features(turned(q, i))[:, :, None] + each_head(features(turned(k, j)))[:, None]
        weights = softmax(logs.logsumexp(-1).permute(0, 3, 1, 2), visible)
        out = torch.einsum("bhij,bjhd->bihd", weights, each_head(v))
    elif kind == "linformer":
        e = layer.key_len_proj.double()[:kv_len]
        f = e if layer.value_len_proj is None else layer.value_len_proj.double()[:kv_len]
        if key_mask is not None:
            k, v = (torch.where(key_mask[:, :, None, None], x, 0) for x in (k, v))
        k, v = torch.einsum("bnhd,np->bphd", k, e), torch.einsum("bnhd,np->bphd", v, f)
        weights = softmax(scores(q, k), torch.tensor(True))
        if key_mask is not None:
            weights = weights * key_mask.any(1)[:, None, None, None]
        out = torch.einsum("bhij,bjhd->bihd", weights, each_head(v))
    else:
        pattern = torch.ones_like(visible)
        if layer.window is not None:
            steps = distance // layer.dilation
            pattern &= (distance % layer.dilation == 0) & (steps.abs() <= layer.window)
        is_global = torch.zeros(batch, kv_len, dtype=torch.bool)
        if layer.global_tokens > 0:
            is_global |= torch.arange(kv_len) < layer.global_tokens
        if global_mask is not None:
            is_global |= global_mask
        if is_global.any():
            pattern |= is_global[:, None, None]
        if kind == "bigbird":
            last = max(int(i.max()), int(j.max())) + 1
            blocks = layer.block_mask(max(-(-last // layer.block_size), 1))
            pattern &= blocks[:, i // layer.block_size][:, :, j // layer.block_size]
        weights = softmax(scores(turned(q, i), turned(k, j)), visible & pattern)
        out = torch.einsum("bhij,bjhd->bihd", weights, each_head(v))
        if is_global.any():
            rows = torch.zeros(batch, q_len, dtype=torch.bool)
            for b in range(batch):
                wanted = j[is_global[b]]
                rows[b] = torch.isin(i, wanted)
            gq, gk, gv = (
                _heads(p, x, h)
                for p, x, h in (
                    (layer.q_global_proj, query, layer.num_heads),
                    (layer.k_global_proj, key, layer.num_kv_heads),
                    (layer.v_global_proj, value, layer.num_kv_heads),
                )
            )
            weights = softmax(scores(turned(gq, i), turned(gk, j)), visible)
            own = torch.einsum("bhij,bjhd->bihd", weights, each_head(gv))
            out = torch.where(rows[:, :, None, None], own, out)
    out = out.flatten(2)
    if layer.out_proj is not None:
        out = out @ layer.out_proj.weight.double().t()
        if layer.out_proj.bias is not None:
            out = out + layer.out_proj.bias.double()
    if query_mask is not None:
        out = torch.where(query_mask[..., None], out, 0)
    return out
