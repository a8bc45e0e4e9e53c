"""Attention kinds for unmodified models of Hugging Face transformers.

:func:`register_transformers` adds them to that library's registry, so that
``attn_implementation="cosformer"`` chooses one as ``"sdpa"`` or ``"eager"`` do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cosformer._functions import cosformer_attention, linear_attention
from cosformer._performer import performer_attention, performer_projection
from cosformer._softmax import softmax_attention

#: attn_implementation -> kind.
NAMES: dict[str, str] = {
    "cosformer": "cosformer",
    "cosformer_softmax": "softmax",
    "cosformer_linear": "linear",
    "cosformer_relu": "relu",
    "cosformer_performer": "performer",
}

# What some models ask of an attention and none of the kinds here has.
_REFUSED = {
    "softcap": "scores that are capped",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a bias on the scores (T5 and its like)",
    "indices": "keys chosen one by one",
    "block_indices": "keys chosen block by block",
}


def register_transformers(
    *, reweight_len: int | None = None, num_features: int | None = None, seed: int = 0
) -> list[str]:
    """Makes the kinds known to transformers as values of ``attn_implementation``.

    ===================== =======================================================================
    "cosformer"           :func:`cosformer.cosformer_attention` (Qin et al., ICLR 2022)
    "cosformer_relu"      :func:`cosformer.linear_attention` with relu, without the cosine
    "cosformer_linear"    the same with elu + 1 (Katharopoulos et al., ICML 2020)
    "cosformer_performer" :func:`cosformer.performer_attention` (Choromanski et al., ICLR 2021)
    "cosformer_softmax"   :func:`cosformer.softmax_attention`: what the model computes anyway
    ===================== =======================================================================

    Longformer and Linformer have parameters of their own, and BigBird's blocks go by position, so
    that padding on the left would change them: use the layers of ``cosformer.nn`` for these.

    Honoured: padding left and right, causality, packed sequences, grouped-query heads, the
    model's scale (softmax, Performer), its sliding window and its dropout (softmax; an error for
    the linear kinds, which form no weights), and every cache of transformers. A cache keeps all
    keys and hands all of them over at every step: a linear kind gives the right result, at the cost
    of the sequence so far a token. Decoding at constant cost is what ``cosformer.Transformer`` and
    the layers do with a state.

    Args:
        reweight_len: M of the cosine; None = the model's config.max_position_embeddings. Longer
            sequences than M are an error.
        num_features: of Performer; None = four times the head's dimension.
        seed: of Performer's projection; layer i draws from seed + i, the same on every machine.

    Returns:
        The names. Registering again replaces the options.

    Raises:
        ImportError: transformers is not installed, or older than 5.

    Example:
        >>> import cosformer, torch, transformers
        >>> names = cosformer.register_transformers()
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        ...     num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
        >>> model = transformers.AutoModelForCausalLM.from_config(
        ...     config, attn_implementation="cosformer")
        >>> model(torch.arange(10)[None]).logits.shape
        torch.Size([1, 10, 100])
    """
    for name, value in (("reweight_len", reweight_len), ("num_features", num_features)):
        if value is not None and value < 1:
            raise ValueError(
                f"register_transformers: {name} is {value}, expected at least 1 or None"
            )
    try:
        from transformers import AttentionInterface, AttentionMaskInterface

        from cosformer.integrations._transformers_masks import visible_mask, visible_of
    except ImportError as error:
        raise ImportError(
            f"register_transformers needs Hugging Face transformers, version 5 ({error}): "
            f'`pip install "transformers>=5,<6"`'
        ) from error

    options = _Options(reweight_len, num_features, seed)
    for name, kind in NAMES.items():
        AttentionInterface.register(name, partial(_attention, name, kind, options, visible_of))
        AttentionMaskInterface.register(name, visible_mask)
    return list(NAMES)


class _Options:
    """Those of a registration, and the projections that follow from them."""

    def __init__(self, reweight_len: int | None, num_features: int | None, seed: int) -> None:
        self.reweight_len = reweight_len
        self.num_features = num_features
        self.seed = seed
        self._projections: dict[tuple[int, int, torch.device], Tensor] = {}

    def model_reweight_len(self, module: nn.Module) -> int:
        if self.reweight_len is not None:
            return self.reweight_len
        config = getattr(module, "config", None)
        found = getattr(config, "max_position_embeddings", None)
        if not isinstance(found, int) or found < 1:
            raise ValueError(
                f"cosformer: max_position_embeddings of {type(config).__name__} is {found}, "
                f"expected the longest sequence: give "
                f"cosformer.register_transformers(reweight_len=...)"
            )
        return found

    def projection(self, module: nn.Module, q: Tensor) -> Tensor:
        layer, head_dim = getattr(module, "layer_idx", None) or 0, q.shape[-1]
        key = (layer, head_dim, q.device)
        if key not in self._projections:
            features = self.num_features or 4 * head_dim
            drawn = performer_projection(features, head_dim, seed=self.seed + layer)
            self._projections[key] = drawn.to(q.device)
        return self._projections[key]


def _attention(
    name: str,
    kind: str,
    options: _Options,
    visible_of: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """In the form of transformers' interface.

    Args:
        query: [batch, heads, q_len, head_dim].
        key, value: [batch, kv_heads, kv_len, dim].

    Returns:
        ([batch, q_len, heads, value_dim], None): no matrix of weights is formed.
    """
    for refused, meaning in _REFUSED.items():
        if kwargs.get(refused) is not None:
            raise ValueError(
                f"{name}: the model gives {refused} ({meaning}), expected none: use "
                f"attn_implementation='sdpa' or 'eager' for this model"
            )
    if kwargs.get("output_attentions"):
        warnings.warn(
            f"{name}: output_attentions=True has no effect, no matrix of weights is formed: see "
            f"cosformer.attention_matrix, or use attn_implementation='eager'",
            stacklevel=2,
        )
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    call, packed = _call_options(
        name, module, q, k, visible_of(attention_mask, name), is_causal, kwargs
    )
    window = call.pop("window")
    if kind == "softmax":
        seed = None
        if dropout > 0:  # drawn from torch's generator, so that torch.manual_seed decides
            seed = torch.randint(2**62, (), dtype=torch.int64)
        attend = partial(
            softmax_attention, scale=scaling, window=window, dropout_p=dropout, dropout_seed=seed
        )
    else:
        _check_linear(name, dropout, window, k.shape[1])
        if kind == "performer":
            attend = partial(performer_attention, projection=options.projection(module, q))
            # The features stand for exp(q.k / sqrt(head_dim)).
            if scaling is not None and scaling != q.shape[-1] ** -0.5:
                q = q * (scaling * q.shape[-1] ** 0.5)
        elif kind == "cosformer":
            _check_positions_known(name, module, q, k, call)
            attend = partial(cosformer_attention, reweight_len=options.model_reweight_len(module))
        else:
            attend = partial(linear_attention, feature_map="relu" if kind == "relu" else "elu1")
    if not packed:
        return attend(q, k, v, **call), None
    batch, length = q.shape[:2]
    q, k, v = (tensor.flatten(0, 1).unsqueeze(0) for tensor in (q, k, v))
    return attend(q, k, v, **call).unflatten(1, (batch, length)).squeeze(0), None


def _call_options(
    name: str,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    visible: Any,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> tuple[dict[str, Any], bool]:
    """Of the functions: causality, positions, key mask; and whether rows are to be packed."""
    batch, q_len, kv_len = q.shape[0], q.shape[1], k.shape[1]
    if visible is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # Nothing says more: the last query stands at the last key, as in decoding.
        call = {"is_causal": causal, "q_start": kv_len - q_len if causal else None, "window": None}
        window = kwargs.get("sliding_window")
        if window is not None and window < kv_len:
            call["window"] = (window - 1, 0) if causal else (window, window)
        offsets = kwargs.get("cu_seq_lens_q")
        if offsets is None:
            return call, False
        if batch != 1:
            raise ValueError(f"{name}: cu_seq_lens_q is given and batch is {batch}, expected 1")
        call |= {"cu_seqlens_q": offsets, "cu_seqlens_k": kwargs.get("cu_seq_lens_k")}
        return call | {"q_start": None}, False

    call = {"is_causal": visible.is_causal, "window": visible.window}
    if visible.sequence_ids is not None:
        return call | {"cu_seqlens_q": _offsets(visible.sequence_ids.expand(batch, -1))}, True
    if visible.key_mask is not None and visible.key_mask.shape != (batch, kv_len):
        raise ValueError(
            f"{name}: the mask is {list(visible.key_mask.shape)}, keys are [batch, kv_len] = "
            f"[{batch}, {kv_len}]"
        )
    call |= {"q_start": visible.q_start, "kv_start": visible.kv_start}
    return call | {"key_mask": visible.key_mask}, False


def _offsets(sequence_ids: Tensor) -> Tensor:
    """[batch, len] -> cu_seqlens of the flattened rows: a sequence ends where its row does."""
    batch, length = sequence_ids.shape
    begins = torch.ones(batch, length, dtype=torch.bool, device=sequence_ids.device)
    begins[:, 1:] = sequence_ids[:, 1:] != sequence_ids[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([batch * length])])


def _check_linear(name: str, dropout: float, window: tuple[int, int] | None, kv_len: int) -> None:
    if dropout > 0:
        raise ValueError(
            f"{name}: dropout on the attention weights is {dropout}, expected 0: a linear kind "
            f"forms no weights. Set it to 0 in the model's config (attention_dropout, "
            f"attention_probs_dropout_prob or attn_pdrop)"
        )
    if window is not None and any(0 <= side < kv_len - 1 for side in window):
        raise ValueError(
            f"{name}: the model has a sliding window, {window} keys left and right, shorter than "
            f"its {kv_len} keys; a linear kind has none. Use 'cosformer_softmax', or set the "
            f"config's sliding_window to None for attention to all keys"
        )


def _check_positions_known(
    name: str, module: nn.Module, q: Tensor, k: Tensor, call: dict[str, Any]
) -> None:
    """The cosine goes by positions; of cross attention transformers does not tell them."""
    q_start, kv_start = call.get("q_start") or 0, call.get("kv_start") or 0
    cross = getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__
    if not call["is_causal"] and "cu_seqlens_q" not in call:
        unaligned = not isinstance(q_start, Tensor) and q_start + q.shape[1] != (
            kv_start + k.shape[1]
        )
        cross = cross or unaligned
    if cross:
        raise ValueError(
            f"{name}: cross attention of {q.shape[1]} queries to {k.shape[1]} keys, expected self "
            f"attention: transformers does not say where its queries stand, which the cosine needs."
            f" Use 'cosformer_relu' or 'cosformer_linear' for a model with cross attention"
        )
