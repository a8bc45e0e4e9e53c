"""One token a row over a cache equals the parallel form (behaviours 23, 27)."""

import cosformer
import pytest
import torch
from helpers import inputs, relative
from softmax_helpers import band, tokens

OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "window": {"window": (5, 0)},
    "window_dilated": {"window": (3, 0), "dilation": 2},
    "window_global": {"window": (4, 0), "global_mask": [0, 6]},
    "blocks": {"block_mask": band(5, heads=4), "block_size": 4},
    "bias": {"relative_bias": torch.randn(4, 9, generator=torch.Generator().manual_seed(2))},
}


def parallel(q, k, v, options, **starts):
    options = dict(options)
    if "global_mask" in options:
        options["global_mask"] = tokens(k.shape[0], k.shape[1], *options["global_mask"])
    return cosformer.softmax_attention(q, k, v, is_causal=True, **options, **starts)


def decode(q, k, v, options, capacity, *, start=None, is_ring=False, cache_mask=None, dtype=None):
    """Row by row, the cache poisoned where no token is yet."""
    options = dict(options)
    rows = q.shape[0]
    if "global_mask" in options:
        options["global_mask"] = tokens(rows, capacity, *options["global_mask"])
    keys = torch.full((rows, capacity, *k.shape[2:]), torch.nan, dtype=k.dtype)
    values = torch.full((rows, capacity, *v.shape[2:]), torch.nan, dtype=v.dtype)
    position = torch.zeros(rows, dtype=torch.int64) if start is None else start.clone()
    outs = []
    for t in range(q.shape[1]):
        token = [x[:, t : t + 1] for x in (q, k, v)]
        outs.append(
            cosformer.softmax_attention_decode_step_(
                *token,
                keys,
                values,
                position,
                start=start,
                cache_mask=cache_mask,
                is_ring=is_ring,
                **options,
            )
        )
    return torch.cat(outs, 1), keys, position


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_behaviour_23_decoding_equals_the_parallel_form(name, dtype):
    q, k, v = inputs(batch=3, q_len=20, heads=4, kv_heads=2, dim=8, value_dim=5, dtype=dtype)
    out, keys, position = decode(q, k, v, OPTIONS[name], 20)
    assert (position == 20).all() and torch.equal(keys, k)
    expected = parallel(q, k, v, OPTIONS[name])
    for row in range(20):
        assert relative(out[:, row], expected[:, row]) < (1e-12 if dtype == torch.float64 else 3e-6)


@pytest.mark.parametrize("name", ["plain", "window", "blocks", "bias"])
def test_rows_stand_at_different_positions(name):
    q, k, v = inputs(batch=3, q_len=9, heads=4)
    start = torch.tensor([0, 2, 7])
    out, _, position = decode(q, k, v, OPTIONS[name], 12, start=start)
    assert torch.equal(position, start + 9)
    expected = parallel(q, k, v, OPTIONS[name], q_start=start, kv_start=start)
    assert relative(out, expected) < 1e-12


@pytest.mark.parametrize("name", ["window", "window_dilated"])
@pytest.mark.parametrize("capacity", [7, 8, 13])
def test_behaviour_27_a_ring_of_the_window_decodes_far_past_it(name, capacity):
    """The memory is the window's; what it says is what the whole sequence would."""
    q, k, v = inputs(batch=2, q_len=60, heads=2)
    start = torch.tensor([0, 5])
    out, keys, _ = decode(q, k, v, OPTIONS[name], capacity, start=start, is_ring=True)
    assert keys.shape[1] == capacity
    expected = parallel(q, k, v, OPTIONS[name], q_start=start, kv_start=start)
    assert relative(out, expected) < 1e-12


def test_hidden_slots_are_never_seen():
    q, k, v = inputs(batch=2, q_len=8)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[0, 2], mask[1, 5:7] = False, False
    out, keys, _ = decode(q, k, v, {}, 8, cache_mask=mask)
    expected = cosformer.softmax_attention(q, k, v, is_causal=True, key_mask=mask)
    assert relative(out, expected) < 1e-12


def test_masked_queries_are_zero():
    q, k, v = inputs(batch=2, q_len=1)
    keys, values = (torch.zeros(2, 3, 2, 4, dtype=torch.float64) for _ in range(2))
    position = torch.zeros(2, dtype=torch.int64)
    out = cosformer.softmax_attention_decode_step_(
        *(q, k, v, keys, values, position), query_mask=torch.tensor([[True], [False]])
    )
    assert (out[1] == 0).all() and torch.equal(out[0], v[0])
    assert (position == 1).all() and torch.equal(keys[:, :1], k)


def test_caches_that_are_views():
    q, k, v = inputs(batch=2, q_len=1)
    wide = torch.zeros(2, 2, 6, 8, dtype=torch.float64)
    keys, values = wide[..., :4].transpose(1, 2), wide[..., 4:].transpose(1, 2)
    position = torch.tensor([3, 1, 0, 2])[1::2]
    out = cosformer.softmax_attention_decode_step_(
        *(q, k, v, keys, values, position), start=torch.tensor([1, 2])
    )
    assert torch.equal(out, v) and torch.equal(wide[:, :, 0, 4:], v[:, 0])
    assert position.tolist() == [2, 3]


def test_errors():
    q, k, v = inputs(batch=2, q_len=1, dtype=torch.float32)
    keys, values = torch.zeros(2, 3, 2, 4), torch.zeros(2, 3, 2, 4)
    at = torch.zeros(2, dtype=torch.int64)
    cases = {
        r"keys has shape \[2, 3, 2, 3\], expected \[rows, capacity, kv_heads, head_dim\] = "
        r"\[2, capacity, 2, 4\]": ((q, k, v, keys[..., :3], values, at), {}),
        "keys have capacity 3, values 2: expected the same": (
            (q, k, v, keys, values[:, :2], at),
            {},
        ),
        "values is Double, the token's are Float": ((q, k, v, keys, values.double(), at), {}),
        r"position is Int \[2\], expected int64 \[2\]": ((q, k, v, keys, values, at.int()), {}),
        r"start is Long \[1\], expected int64 \[2\]": (
            (q, k, v, keys, values, at),
            {"start": at[:1]},
        ),
        r"cache_mask has shape \[2, 2\], expected \[batch, capacity\] = \[2, 3\]": (
            (q, k, v, keys, values, at),
            {"cache_mask": torch.ones(2, 2, dtype=torch.bool)},
        ),
        "query has length 2, key has 1, expected 1": (
            (q.expand(2, 2, 2, 4), k, v, keys, values, at),
            {},
        ),
        "dilation is 2 without a window": ((q, k, v, keys, values, at), {"dilation": 2}),
        "capacity 3": ((q, k, v, keys, values, at + 3), {}),
        "start": ((q, k, v, keys, values, at), {"start": at + 1}),
    }
    for message, (args, options) in cases.items():
        before = [t.clone() for t in (keys, values, at)]
        with pytest.raises(RuntimeError, match=message):
            cosformer.softmax_attention_decode_step_(*args, **options)
        # Nothing is half-written.
        assert all(torch.equal(a, b) for a, b in zip((keys, values, at), before, strict=True))
    with pytest.raises(RuntimeError, match="in place and has no gradient"):
        cosformer.softmax_attention_decode_step_(q.requires_grad_(), k, v, keys, values, at)
