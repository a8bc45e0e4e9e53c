"""Another attention inside an existing model, its parameters kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cosformer.nn import Attention, attention

_WHERE = "replace_attention"
_FORMS_WEIGHTS = ("softmax", "linformer", "longformer", "bigbird")
# Options that follow from the module which is replaced.
_FIXED = {
    *("kdim", "vdim", "head_dim", "value_dim", "num_kv_heads", "one_kv_head", "share_kv"),
    *("qkv_bias", "out_bias", "out_proj", "is_causal", "device", "dtype"),
}


class ReplacedAttention(nn.Module):
    """Called as ``nn.MultiheadAttention``, computed by ``attention``, a layer of ours.

    Made by :func:`replace_attention`. The result is ``(out, None)``: weights are never formed.
    ``key_padding_mask`` keeps nn.MultiheadAttention's sense here (True, or -inf, = ignore). A row
    that sees no key is 0 before the output projection (there: NaN). Whether a call is causal
    follows from it: ``is_causal`` or an ``attn_mask`` that is the causal one.
    """

    # nn.TransformerEncoderLayer reads these and then leaves its fused path, which would go by the
    # parameters of nn.MultiheadAttention.
    _qkv_same_embed_dim = False
    in_proj_bias = None

    def __init__(self, layer: Attention, batch_first: bool) -> None:
        super().__init__()
        self.attention = layer
        self.batch_first = batch_first
        self.embed_dim = layer.embed_dim
        self.num_heads = layer.num_heads
        self.head_dim = layer.head_dim

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """As nn.MultiheadAttention's; ``need_weights`` and ``average_attn_weights`` change nothing.

        Raises:
            ValueError: for an ``attn_mask`` that is not causal, or a causal call of a kind without
                that form.
        """
        causal = is_causal or attn_mask is not None
        if causal and not is_causal:
            _check_causal(attn_mask, query, key, self.batch_first)
        if causal and self.attention.kind == "linformer":
            raise ValueError(
                f"{_WHERE}: a causal call of kind {self.attention.kind!r}, which has no causal "
                f"form: each projected key mixes all positions"
            )
        self.attention.is_causal = causal
        is_batch = query.dim() == 3
        same_key, same_value = key is query, value is key
        query = self._batch_first(query)
        key = query if same_key else self._batch_first(key)
        value = key if same_value else self._batch_first(value)
        masks: dict[str, Tensor] = {}
        if key_padding_mask is not None:
            if not is_batch:
                key_padding_mask = key_padding_mask[None]
            masks["key_mask"] = _key_mask(key_padding_mask)
            # There, padding asks as everything else does.
            masks["query_mask"] = masks["key_mask"].new_ones(query.shape[:2])
        out = self.attention(query, key, value, **masks)
        if not is_batch:
            return out[0], None
        return (out if self.batch_first else out.transpose(0, 1)), None

    def _batch_first(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)


def _key_mask(key_padding_mask: Tensor) -> Tensor:
    if key_padding_mask.dtype == torch.bool:
        return ~key_padding_mask
    hidden = key_padding_mask.isneginf()
    if not torch.compiler.is_compiling() and not (hidden | (key_padding_mask == 0)).all():
        raise ValueError(
            f"{_WHERE}: key_padding_mask adds finite numbers to scores, expected bool, or 0 and "
            f"-inf"
        )
    return ~hidden


def _check_causal(mask: Tensor, query: Tensor, key: Tensor, batch_first: bool) -> None:
    """That attn_mask (True or -inf = hidden) hides exactly what is later."""
    sequence = 0 if query.dim() == 2 or not batch_first else 1
    size = (query.shape[sequence], key.shape[sequence])
    later = torch.ones(size, dtype=torch.bool, device=mask.device).triu(1)
    hidden = mask if mask.dtype == torch.bool else mask.isneginf()
    is_causal = tuple(mask.shape[-2:]) == size and bool((hidden == later).all())
    if is_causal and mask.dtype != torch.bool:
        is_causal = bool(((mask == 0) | hidden).all())
    if not is_causal:
        raise ValueError(
            f"{_WHERE}: attn_mask {list(mask.shape)} is not causal: expected none, or one that "
            f"hides exactly the later keys; what padding hides goes to key_padding_mask"
        )


def _replacement(old: nn.MultiheadAttention, name: str, kind: str, options: dict) -> nn.Module:
    at = f"{_WHERE}: {name or 'the module'}"
    if old.bias_k is not None or old.bias_v is not None:
        raise ValueError(f"{at} has add_bias_kv=True: a key that belongs to no token is no option")
    if old.add_zero_attn:
        raise ValueError(f"{at} has add_zero_attn=True: a key of zeros is no option")
    options = dict(options)
    if kind in _FORMS_WEIGHTS:
        options.setdefault("dropout", old.dropout)
    elif old.dropout > 0.0 and options.pop("dropout", None) != 0.0:
        raise ValueError(
            f"{at} drops weights (dropout={old.dropout}), which kind {kind!r} never forms: give "
            f"dropout=0.0 to do without"
        )
    packed = old._qkv_same_embed_dim
    weight = old.in_proj_weight if packed else old.q_proj_weight
    layer = attention(
        kind,
        old.embed_dim,
        old.num_heads,
        kdim=old.kdim,
        vdim=old.vdim,
        qkv_bias=old.in_proj_bias is not None,
        out_bias=old.out_proj.bias is not None,
        device=weight.device,
        dtype=weight.dtype,
        **options,
    )
    q, k, v = (
        old.in_proj_weight.chunk(3)
        if packed
        else (old.q_proj_weight, old.k_proj_weight, old.v_proj_weight)
    )
    kept = {"q_proj": (q, weight), "k_proj": (k, weight), "v_proj": (v, weight)}
    if not packed:
        kept |= {"k_proj": (k, old.k_proj_weight), "v_proj": (v, old.v_proj_weight)}
    biases = (None,) * 3 if old.in_proj_bias is None else old.in_proj_bias.chunk(3)

    def keep(projection: nn.Linear, part: str, source: Tensor, of: Tensor) -> None:
        target = getattr(projection, part)
        with torch.no_grad():
            target.copy_(source)
        target.requires_grad_(of.requires_grad)

    for (child, (source, of)), bias in zip(kept.items(), biases, strict=True):
        keep(getattr(layer, child), "weight", source, of)
        if bias is not None:
            keep(getattr(layer, child), "bias", bias, old.in_proj_bias)
        if kind == "longformer":  # global tokens start from what all had
            own = getattr(layer, child.replace("_proj", "_global_proj"))
            own.load_state_dict(getattr(layer, child).state_dict())
    keep(layer.out_proj, "weight", old.out_proj.weight, old.out_proj.weight)
    if old.out_proj.bias is not None:
        keep(layer.out_proj, "bias", old.out_proj.bias, old.out_proj.bias)
    return ReplacedAttention(layer, old.batch_first).train(old.training)


def replace_attention(module: nn.Module, *, kind: str, **options: Any) -> nn.Module:
    """Every ``nn.MultiheadAttention`` inside a model becomes a layer of another kind.

    In place, with its parameters (values, ``requires_grad``) in the new layer's ``q_proj``,
    ``k_proj``, ``v_proj`` and ``out_proj``; give the new parameters to the optimizer. kind
    "softmax" computes what the model did. The layers are called as before, see
    :class:`ReplacedAttention`.

    Args:
        module: a model, or an ``nn.MultiheadAttention``.
        kind: as in :func:`cosformer.nn.attention`.
        options: those of the kind that leave the parameters' shapes alone, such as
            ``reweight_len``. ``dropout`` of weights: as it was; kinds that never form them want
            ``dropout=0.0`` where it was more.

    Returns:
        module, or what replaces it.

    Raises:
        ValueError: for ``add_bias_kv``, ``add_zero_attn``, dropout that the kind lacks, or a model
            without any ``nn.MultiheadAttention``; nothing is replaced then.

    Example:
        >>> import torch, cosformer
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        >>> x = torch.randn(1, 5, 16)
        >>> before = model(x)
        >>> torch.allclose(cosformer.replace_attention(model, kind="softmax")(x), before, atol=1e-5)
        True
        >>> cosformer.replace_attention(
        ...     torch.nn.MultiheadAttention(16, 2), kind="cosformer", reweight_len=64
        ... ).attention
        CosformerAttention(
          16, 2, head_dim=8, is_causal=False, feature_map='relu', reweight_len=64
          (q_proj): Linear(in_features=16, out_features=16, bias=True)
          (k_proj): Linear(in_features=16, out_features=16, bias=True)
          (v_proj): Linear(in_features=16, out_features=16, bias=True)
          (out_proj): Linear(in_features=16, out_features=16, bias=True)
        )
    """
    fixed = sorted(_FIXED & set(options))
    if fixed:
        raise ValueError(
            f"{_WHERE}: {fixed[0]} is given, expected none: it follows from the module that is "
            f"replaced"
        )
    old = {
        name: child
        for name, child in module.named_modules(remove_duplicate=False)
        if isinstance(child, nn.MultiheadAttention)
    }
    if not old:
        raise ValueError(f"{_WHERE}: no nn.MultiheadAttention in a {type(module).__name__}")
    made: dict[nn.Module, nn.Module] = {}  # one that is used twice stays one
    for name, child in old.items():
        if child not in made:
            made[child] = _replacement(child, name, kind, options)
    if module in made:
        return made[module]
    for name, child in old.items():
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, made[child])
    for child in module.modules():
        if isinstance(child, nn.TransformerEncoder):
            child.use_nested_tensor = False  # of its fused path alone
    return module
