"""Linformer: attention over keys and values shortened along the sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cosformer._matrix import attention_matrix
from cosformer._softmax import linformer_attention
from cosformer.nn._attention import Attention
from cosformer.nn._call import Call, Inputs, Result
from cosformer.nn._dropout import draw_dropout_seed
from cosformer.nn._options import SharedOptions, at_least, check_dropout, refuse

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LinformerAttention(Attention):
    """Linformer (Wang et al. 2020): softmax over projected_len keys. Not causal, no state.

    Args:
        max_len: rows of the length projections: the greatest number of keys; shorter inputs use
            the first rows.
        projected_len: None = max_len / 4, at least 1.
        share_kv: keys and values, and their projections, are one: no ``v_proj`` and no
            ``value_len_proj``.
        one_kv_head: num_kv_heads is 1.
        scale: of the scores. None = 1 / sqrt(head_dim).
        dropout: of a weight, in training mode.
        options: those of :class:`Attention` but rotary positions.

    Parameters beside the projections: ``key_len_proj``, ``value_len_proj``
    [max_len, projected_len].

    Example:
        >>> import torch, cosformer
        >>> layer = cosformer.nn.LinformerAttention(16, 2, max_len=64, projected_len=8)
        >>> layer(torch.randn(3, 50, 16)).shape
        torch.Size([3, 50, 16])
    """

    kind = "linformer"
    _no_bias_because = "a projected key has no position of its own"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        max_len: int,
        projected_len: int | None = None,
        share_kv: bool = False,
        one_kv_head: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
        **options: Unpack[SharedOptions],
    ) -> None:
        check_dropout(dropout)
        if max_len is None or max_len < 1:
            raise ValueError(
                f"attention: max_len is {max_len}, expected the greatest number of keys for kind "
                f'"linformer"'
            )
        if one_kv_head:
            if options.get("num_kv_heads") not in (None, 1):
                raise ValueError(
                    f"attention: one_kv_head with num_kv_heads {options['num_kv_heads']}, "
                    f"expected 1 or none given"
                )
            options["num_kv_heads"] = 1
        self.max_len = max_len
        self.projected_len = max(max_len // 4, 1) if projected_len is None else projected_len
        self._share_kv = share_kv
        super().__init__(embed_dim, num_heads, _share_kv=share_kv, **options)
        self.scale = scale
        self.dropout = dropout
        size = (max_len, self.projected_len)
        factory = {"device": options.get("device"), "dtype": options.get("dtype")}
        self.key_len_proj = nn.Parameter(torch.empty(size, **factory))
        self.value_len_proj = None if share_kv else nn.Parameter(torch.empty(size, **factory))
        self._reset_own_parameters()

    def _check_options(self) -> None:
        super()._check_options()
        refuse(
            self.kind,
            self.is_causal,
            "has no causal form: each projected key mixes all positions, later ones too",
        )
        refuse(
            self.kind,
            self.rotary_base is not None,
            "has no rotary positions: a projected key mixes all positions",
        )
        at_least(1, self.projected_len, "projected_len")
        if self.projected_len > self.max_len:
            raise ValueError(
                f"attention: projected_len is {self.projected_len}, expected 1 to max_len "
                f"({self.max_len})"
            )
        if self._share_kv and (self.value_dim != self.head_dim or self.vdim != self.kdim):
            raise ValueError(
                f"attention: share_kv makes keys and values one, found head_dim {self.head_dim} "
                f"and value_dim {self.value_dim}, kdim {self.kdim} and vdim {self.vdim}: expected "
                f"equal ones"
            )

    def _reset_own_parameters(self) -> None:
        # Wang et al.: N(0, 1 / projected_len).
        for each in (self.key_len_proj, self.value_len_proj):
            if each is not None:
                nn.init.normal_(each, 0.0, self.projected_len**-0.5)

    def _len_projs(self) -> tuple[Tensor, Tensor]:
        keys = self.key_len_proj
        return keys, keys if self.value_len_proj is None else self.value_len_proj

    def _attend(self, inputs: Inputs, call: Call) -> Result:
        refuse(
            self.kind,
            call.return_state or call.state is not None,
            "has no state: each projected key mixes all positions",
        )
        refuse(
            self.kind,
            call.cu_seqlens_q is not None,
            "takes no packed sequences: its projections count the keys of a row from 0; give one "
            "row a sequence, with key_mask",
        )
        refuse(
            self.kind,
            call.q_start is not None or call.kv_start is not None,
            "takes no q_start or kv_start: its projections count the keys of a row from 0",
        )
        seed = draw_dropout_seed(self.dropout, self.training, inputs.query)
        out = linformer_attention(
            *self._project(inputs),
            *self._len_projs(),
            scale=self.scale,
            dropout_p=0.0 if seed is None else self.dropout,
            dropout_seed=seed,
            key_mask=call.key_mask,
            query_mask=call.query_mask,
        )
        return Result(out)

    def _matrix(self, inputs: Inputs, call: Call) -> Tensor:
        seq_len = inputs.query.shape[1]
        if seq_len > self.max_len:
            raise ValueError(f"attention_matrix: {seq_len} tokens, max_len is {self.max_len}")
        heads = self._project(inputs)
        key_proj, value_proj = (each[:seq_len] for each in self._len_projs())
        # out = W (F^T v) = (W F^T) v
        keys = torch.einsum("bnhd,np->bphd", heads.k, key_proj)
        weights = attention_matrix("softmax", heads.q, keys, scale=self.scale)
        return weights @ value_proj.t()
