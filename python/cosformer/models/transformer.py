"""The generic Transformer by its config: parameter names, values and files are those of C++."""

from __future__ import annotations

import os
from typing import Any, Literal, TypeVar, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cosformer._softmax import t5_relative_bias
from cosformer.models._positions import SinusoidalTable, check_ids, cosine_reach, limit_of
from cosformer.models.config import ModelConfig
from cosformer.models.model_io import load_model, save_model
from cosformer.models.state import ModelState
from cosformer.nn import Block, Norm, attention

_Self = TypeVar("_Self", bound="Transformer")


class _Table(nn.Module):
    """A matrix of rows by index: its values are drawn by the model."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, dim))

    def extra_repr(self) -> str:
        return ", ".join(str(size) for size in self.weight.shape)


def _attention_options(c: ModelConfig, layer: int) -> dict[str, Any]:
    """What the layer's kind reads, by the names of ``cosformer.nn``."""
    a = c.layer_attention(layer)
    if a.kind in ("cosformer", "linear"):
        return {
            "feature_map": a.feature_map or ("relu" if a.kind == "cosformer" else "elu1"),
            "reweight_len": cosine_reach(c, layer) or None,
            "normalizer": a.normalizer,
            "eps": a.eps,
        }
    if a.kind == "performer":
        return {
            "num_features": a.num_features or None,
            "orthogonal": a.orthogonal,
            "trainable_projection": a.trainable_projection,
            # Layers differ in what they draw.
            "projection_seed": a.projection_seed + layer,
        }
    options: dict[str, Any] = {"scale": a.scale or None, "dropout": a.dropout}
    if a.kind in ("softmax", "longformer"):
        options |= {"window": a.window or None, "dilation": a.dilation}
    if a.kind == "longformer":
        options |= {"global_tokens": a.global_tokens}
    if a.kind == "linformer":
        options |= {
            "max_len": c.max_len,
            "projected_len": a.projected_len or None,
            "share_kv": a.share_kv,
            "one_kv_head": a.one_kv_head,
        }
    if a.kind == "bigbird":
        options |= {
            "block_size": a.block_size,
            "num_random_blocks": a.num_random_blocks,
            "window_blocks": a.window_blocks,
            "first_global_blocks": a.first_global_blocks,
            "last_global_blocks": a.last_global_blocks,
            "block_seed": a.block_seed + layer,
        }
    return options


def _block(c: ModelConfig, layer: int) -> Block:
    a = c.layer_attention(layer)
    rotary: dict[str, Any] = {}
    if c.position == "rope":
        rotary = {
            "rotary_base": c.rope_base,
            "rotary_dim": c.rope_dim or None,
            "rotary_interleaved": c.rope_interleaved,
        }
    layer_attention = attention(
        a.kind,
        c.embed_dim,
        c.num_heads,
        head_dim=c.head_size,
        num_kv_heads=1 if a.one_kv_head else c.kv_heads,
        is_causal=c.is_causal,
        qkv_bias=c.qkv_bias,
        out_bias=c.out_bias,
        **rotary,
        **_attention_options(c, layer),
    )
    return Block(
        layer_attention,
        c.ffn_size,
        activation=c.activation,
        gated=c.gated,
        ffn_bias=c.mlp_bias,
        norm=c.norm,
        norm_eps=c.norm_eps,
        norm_bias=c.norm_bias,
        pre_norm=c.norm_placement == "pre",
        dropout=c.dropout,
    )


class Transformer(nn.Module):
    """The language model of a ``ModelConfig``: causal, or (is_causal false) an encoder whose head
    gives logits of the tokens, as masked language models have.

    Parameters, the contract of model.safetensors: ``embed.weight``, ``position.weight``
    (learned), ``relative_bias.weight`` (t5: [buckets, heads], shared by the layers),
    ``embed_norm`` (when asked), ``layers.N.{attention_norm,attention,ffn_norm,ffn}``,
    ``final_norm`` (norm_placement "pre"; "post" ends in a norm anyway), ``head.weight`` (when not
    tied). Matrices start at N(0, init_std), biases at 0, norms at 1; projections along the length
    and of performer as their layer draws them.

    A config with a contradiction is a ValueError (``ModelConfig.validate``).

    >>> import torch, cosformer
    >>> config = cosformer.ModelConfig(vocab_size=11, embed_dim=16, num_layers=2, num_heads=2)
    >>> model = cosformer.Transformer(config).eval()
    >>> ids = torch.tensor([[1, 2, 3, 4]])
    >>> logits = model(ids)
    >>> logits.shape
    torch.Size([1, 4, 11])
    >>> _, state = model(ids[:, :3], return_state=True)
    >>> step, state = model(ids[:, 3:], state=state, return_state=True)
    >>> torch.allclose(step[:, 0], logits[:, 3], atol=1e-5)
    True
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        config.validate()
        c = self.config = config
        self._limit = limit_of(c)
        self._checkpointing = False
        self.embed = _Table(c.vocab_size, c.embed_dim)
        rows = c.position_offset + c.max_len
        self.position = _Table(rows, c.embed_dim) if c.position == "learned" else None
        self.sinusoids = SinusoidalTable(c.embed_dim, rows) if c.position == "sinusoidal" else None
        is_t5 = c.position == "t5"
        self.relative_bias = _Table(c.relative_buckets, c.num_heads) if is_t5 else None
        self.embed_norm = self._norm() if c.embed_norm else None
        self.layers = nn.ModuleList([_block(c, i) for i in range(c.num_layers)])
        self.final_norm = self._norm() if c.norm_placement == "pre" else None
        self.head = None if c.tie_embeddings else _Table(c.vocab_size, c.embed_dim)
        self.reset_parameters()

    def _norm(self) -> Norm:
        c = self.config
        return Norm(c.norm, c.embed_dim, eps=c.norm_eps, bias=c.norm_bias)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the parameters anew from torch's generator; performer's projections from their
        seed."""
        for layer in self.layers:
            if layer.attention.kind == "performer":
                layer.attention.redraw_projection(layer.attention.projection_seed)
        for name, parameter in self.named_parameters():
            if name.endswith("attention.projection"):
                continue
            if name.endswith("_len_proj"):  # Wang et al. 2020
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
            elif parameter.dim() == 2:
                parameter.normal_(0.0, self.config.init_std)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.fill_(1.0)

    @property
    def max_positions(self) -> int | None:
        """Tokens that a sequence may have: max_len where positions come from a table (learned,
        sinusoidal) or a layer is linformer, the smallest reweight_len + 1 of the cosine layers;
        None where every position is relative (rope, t5, none) and no layer has the cosine."""
        return None if self._limit is None else self._limit.positions

    def set_activation_checkpointing(self, on: bool = True) -> None:
        """Trades time for memory: layers recompute their activations in the backward
        (``torch.utils.checkpoint``, not re-entrant)."""
        self._checkpointing = on

    @overload
    def forward(
        self,
        ids: Tensor,
        *,
        key_mask: Tensor | None = ...,
        state: ModelState | None = ...,
        return_state: Literal[False] = ...,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        ids: Tensor,
        *,
        key_mask: Tensor | None = ...,
        state: ModelState | None = ...,
        return_state: Literal[True],
    ) -> tuple[Tensor, ModelState]: ...

    def forward(
        self,
        ids: Tensor,
        *,
        key_mask: Tensor | None = None,
        state: ModelState | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, ModelState]:
        """Logits [batch, seq, vocab] of ids, int64 [batch, seq]; (logits, state) when asked.

        key_mask: bool [batch, seq], True = a real token; None = all are. state: what an earlier
        call returned (causal models only); ids are then the next tokens, each row from its own
        position, and the state given is not changed. Padding on the right does not move a row on.
        A sequence longer than ``max_positions`` is a ValueError that names both numbers.
        """
        x, after = self._run(ids, key_mask, state, return_state)
        return (self.logits(x), after) if after is not None else self.logits(x)

    @overload
    def hidden_states(
        self,
        ids: Tensor,
        *,
        key_mask: Tensor | None = ...,
        state: ModelState | None = ...,
        return_state: Literal[False] = ...,
    ) -> Tensor: ...

    @overload
    def hidden_states(
        self,
        ids: Tensor,
        *,
        key_mask: Tensor | None = ...,
        state: ModelState | None = ...,
        return_state: Literal[True],
    ) -> tuple[Tensor, ModelState]: ...

    def hidden_states(
        self,
        ids: Tensor,
        *,
        key_mask: Tensor | None = None,
        state: ModelState | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, ModelState]:
        """As ``forward``, but what the head reads: [batch, seq, embed_dim], after the last norm."""
        x, after = self._run(ids, key_mask, state, return_state)
        return (x, after) if after is not None else x

    @torch.no_grad()
    def decode_step(
        self, ids: Tensor, state: ModelState | None = None
    ) -> tuple[Tensor, ModelState]:
        """The next token of each row, int64 [batch, 1] -> (logits [batch, 1, vocab], state).

        As ``forward(ids, state=state, return_state=True)``, but in place: ``state`` is used up, go
        on with the one that is returned; ``state.clone()`` first keeps it for another way on.
        """
        if state is None or ids.shape[1:] != (1,) or not self.config.is_causal:
            return self(ids, state=state, return_state=True)
        check_ids(ids, self.config.vocab_size)
        self._check_state(state, ids)
        x = self._embed(ids, state.position)
        bias = self._relative_bias()
        after = []
        for layer, held in zip(self.layers, state.layers, strict=True):
            x, held = layer.decode_step(x, held, relative_bias=bias)
            after.append(held)
        return self.logits(self._normed(x)), ModelState(tuple(after), state.position + 1)

    def attention_matrices(self, ids: Tensor) -> list[Tensor]:
        """The weights w_ij / norm_i of every layer on ids, each [batch, heads, seq, seq], for
        inspection (``cosformer.nn.Attention.attention_matrix``). Small inputs only."""
        with torch.no_grad():
            check_ids(ids, self.config.vocab_size)
            x = self._embed(ids, None)
            bias = self._relative_bias()
            out = []
            for layer in self.layers:
                out.append(layer.attention_matrix(x, relative_bias=bias))
                x = layer(x, relative_bias=bias)
            return out

    def logits(self, hidden: Tensor) -> Tensor:
        """The head: [..., embed_dim] -> [..., vocab]."""
        weight = self.embed.weight if self.head is None else self.head.weight
        out = F.linear(hidden, weight)
        return out if self.config.logit_scale == 1.0 else out * self.config.logit_scale

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, tokenizer: str | None = None
    ) -> None:
        """Writes config.json and model.safetensors into the folder (made if it is not there).

        Every file appears whole or not at all; config.json last: a folder that has it is whole.
        C++ and the program ``cosformer`` read it. tokenizer "bytes" writes tokenizer.json too
        (token = byte, vocab_size at least 256), so that ``cosformer generate`` takes the folder.
        OSError where a file cannot be written: the old one is then as it was.
        """
        save_model(self, folder, tokenizer)

    @classmethod
    def from_pretrained(
        cls: type[_Self],
        folder: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> _Self:
        """The model of a folder that Python, C++ or the program wrote, bit for bit.

        dtype, device: None = those of the file, on the CPU. The model is in training mode, as a
        new one; no random number is drawn. A missing, extra or misshapen tensor is a ValueError
        with expected, found and the tensor's name; a missing file a FileNotFoundError.
        """
        return load_model(cls, folder, dtype, device)

    def _run(
        self, ids: Tensor, key_mask: Tensor | None, state: ModelState | None, return_state: bool
    ) -> tuple[Tensor, ModelState | None]:
        c = self.config
        check_ids(ids, c.vocab_size)
        has_state = state is not None or return_state
        if has_state and not c.is_causal:
            raise ValueError(
                "transformer: a state needs is_causal: true, found false: a model that sees the "
                "future cannot go token by token"
            )
        if state is not None:
            self._check_state(state, ids)
        x = self._embed(ids, None if state is None else state.position)
        bias = self._relative_bias()
        if not has_state:
            for layer in self.layers:
                x = self._through(layer, x, key_mask, bias)
            return self._normed(x), None
        after = []
        for i, layer in enumerate(self.layers):
            held = None if state is None else state.layers[i]
            x, held = layer(x, key_mask=key_mask, state=held, return_state=True, relative_bias=bias)
            after.append(held)
        return self._normed(x), ModelState(tuple(after), self._moved(ids, key_mask, state))

    def _check_state(self, state: ModelState, ids: Tensor) -> None:
        if len(state.layers) != self.config.num_layers:
            raise ValueError(
                f"transformer: state has {len(state.layers)} layers, expected "
                f"{self.config.num_layers}"
            )
        if state.position.shape != ids.shape[:1]:
            raise ValueError(
                f"transformer: state has {state.position.shape[0]} rows, ids {ids.shape[0]}"
            )

    def _through(
        self, layer: Block, x: Tensor, key_mask: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        if not (self._checkpointing and torch.is_grad_enabled()):
            return layer(x, key_mask=key_mask, relative_bias=bias)
        return checkpoint(layer, x, key_mask=key_mask, relative_bias=bias, use_reentrant=False)

    def _normed(self, x: Tensor) -> Tensor:
        return x if self.final_norm is None else self.final_norm(x)

    def _relative_bias(self) -> Tensor | None:
        """T5's bias by distance, for every layer; None for other positions."""
        if self.relative_bias is None:
            return None
        return t5_relative_bias(
            self.relative_bias.weight,
            bidirectional=not self.config.is_causal,
            max_distance=self.config.max_distance,
        )

    @staticmethod
    def _moved(ids: Tensor, key_mask: Tensor | None, state: ModelState | None) -> Tensor:
        """Each row's next position: padding on the right does not count."""
        batch, count = ids.shape
        if key_mask is None:
            moved = torch.full((batch,), count, dtype=torch.int64, device=ids.device)
        else:  # 1 + the place of the last real token
            places = torch.arange(1, count + 1, device=ids.device)
            moved = torch.where(key_mask, places, 0).amax(-1) if count else key_mask.sum(-1)
        return moved if state is None else state.position + moved

    def _embed(self, ids: Tensor, start: Tensor | None) -> Tensor:
        c = self.config
        end = self._end(ids, start)
        if self._limit is not None and end is not None and end > self._limit.positions:
            raise ValueError(
                f"transformer: the sequence has {end} tokens, the model knows "
                f"{self._limit.positions} positions ({self._limit.key}): shorten it, or go on from "
                f"its latter half (generate: rolling=True)"
            )
        x = F.embedding(ids, self.embed.weight)
        if c.embed_scale != 1.0:
            x = x * c.embed_scale
        table = None
        if self.position is not None:
            table = self.position.weight
        elif self.sinusoids is not None:
            most = c.max_len if end is None else end
            table = self.sinusoids(c.position_offset + most, x)
        if table is not None:
            places = slice(c.position_offset, c.position_offset + ids.shape[1])
            if start is None:
                x = x + table[places]
            else:
                steps = torch.arange(places.start, places.stop, device=ids.device)
                rows = start.unsqueeze(-1) + steps
                x = x + F.embedding(rows, table)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        return F.dropout(x, c.dropout, self.training) if c.dropout > 0.0 else x

    @staticmethod
    def _end(ids: Tensor, start: Tensor | None) -> int | None:
        """Positions that the call reaches; None while a graph is compiled, which must not depend
        on where a state stands."""
        if start is None:
            return ids.shape[1]
        if torch.compiler.is_compiling() or start.device.type == "meta" or not start.numel():
            return None
        return int(start.max()) + ids.shape[1]
