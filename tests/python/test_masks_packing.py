"""Padding and packing change nothing for what is real (behaviours 13, 15)."""

import cosformer
import pytest
import torch
from helpers import gradients, inputs, relative

OPTIONS = [
    {"reweight_len": 64},
    {"reweight_len": 64, "is_causal": True},
    {"feature_map": "elu1", "is_causal": True, "rotary_base": 50.0},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("padding", [0.0, 7.0, float("nan")])
def test_behaviour_13_a_padded_batch_equals_each_sequence_alone(options, padding):
    lengths = [40, 1, 17]
    tensors = inputs(batch=3, q_len=40, heads=4, kv_heads=2, dim=8, dtype=torch.float32)
    mask = torch.arange(40) < torch.tensor(lengths)[:, None]
    for t in tensors:
        t[~mask] = padding
    grad = torch.randn(3, 40, 4, 8)
    out, found = gradients(
        lambda *t: cosformer.linear_attention(*t, key_mask=mask, query_mask=mask, **options),
        tensors,
        grad,
    )
    for row, length in enumerate(lengths):
        alone = [t[row : row + 1, :length] for t in tensors]
        expected_out, expected = gradients(
            lambda *t: cosformer.linear_attention(*t, **options),
            alone,
            grad[row : row + 1, :length],
        )
        assert relative(out[row, :length], expected_out[0]) < 1e-6
        assert (out[row, length:] == 0).all()
        for a, b in zip(found, expected, strict=True):
            assert relative(a[row, :length], b[0]) < 1e-5
            assert (a[row, length:] == 0).all()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_behaviour_15_packed_equals_each_sequence_alone(options, dtype):
    lengths = [5, 0, 30, 1]
    total = sum(lengths)
    offsets = torch.tensor([0, 5, 5, 35, 36], dtype=dtype)
    tensors = inputs(batch=1, q_len=total, heads=4, kv_heads=2, dim=8, dtype=torch.float32)
    grad = torch.randn(1, total, 4, 8)
    call = lambda *t: cosformer.linear_attention(*t, cu_seqlens_q=offsets, **options)  # noqa: E731
    out, found = gradients(call, tensors, grad)
    for begin, end in zip(offsets[:-1], offsets[1:], strict=True):
        part = slice(int(begin), int(end))
        expected_out, expected = gradients(
            lambda *t: cosformer.linear_attention(*t, **options),
            [t[:, part] for t in tensors],
            grad[:, part],
        )
        assert relative(out[:, part], expected_out) < 1e-6
        for a, b in zip(found, expected, strict=True):
            assert relative(a[:, part], b) < 1e-5


def test_behaviour_15_other_sequences_change_no_bit():
    tensors = inputs(batch=1, q_len=30, dim=8, dtype=torch.float32)
    offsets = torch.tensor([0, 11, 30])
    call = lambda *t: cosformer.linear_attention(  # noqa: E731
        *t, cu_seqlens_q=offsets, is_causal=True, reweight_len=64
    )
    out, found = gradients(call, tensors)
    for t in tensors:
        t[:, 11:] = float("nan")
    again, poisoned = gradients(call, tensors)
    assert torch.equal(out[:, :11], again[:, :11])
    for a, b in zip(found, poisoned, strict=True):
        assert torch.equal(a[:, :11], b[:, :11])


def test_packed_cross_attention_aligns_at_the_top_left_or_by_starts():
    q, k, v = inputs(batch=1, q_len=7, kv_len=12, dim=8)
    q_at, k_at = torch.tensor([0, 2, 7]), torch.tensor([0, 5, 12])
    options = {"is_causal": True, "reweight_len": 64}
    for starts in (None, torch.tensor([3, 2])):
        out = cosformer.linear_attention(
            q, k, v, cu_seqlens_q=q_at, cu_seqlens_k=k_at, q_start=starts, **options
        )
        for s in range(2):
            rows = slice(int(q_at[s]), int(q_at[s + 1]))
            keys = slice(int(k_at[s]), int(k_at[s + 1]))
            expected = cosformer.linear_attention(
                q[:, rows],
                k[:, keys],
                v[:, keys],
                q_start=None if starts is None else int(starts[s]),
                **options,
            )
            torch.testing.assert_close(out[:, rows], expected, rtol=1e-12, atol=1e-13)


def test_a_mask_of_a_wide_tensor_is_read_by_its_strides():
    tensors = inputs(q_len=6, dtype=torch.float32)
    wide = torch.rand(2, 12) > 0.5
    view, turned = wide[:, 3:9], wide[:, ::2]
    for mask in (view, turned, wide[:, :6].t().contiguous().t()):
        out = cosformer.linear_attention(*tensors, key_mask=mask, query_mask=mask)
        dense = mask.contiguous()
        again = cosformer.linear_attention(*tensors, key_mask=dense, query_mask=dense)
        assert torch.equal(out, again)
