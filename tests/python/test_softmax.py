"""Softmax attention against the definition, and what holds for any (behaviours 1, 3-5, 7-9, 11, 12,
16, 17, 20, 30)."""

import cosformer
import pytest
import torch
from helpers import gradients, inputs, off_by, relative
from softmax_helpers import PATTERNS, definition, patterns, tokens, visible

LIMIT = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("name", PATTERNS)
def test_against_the_definition(dtype, name):
    tensors = inputs(q_len=40, heads=4, kv_heads=2, dim=8, value_dim=5, dtype=dtype)
    options = patterns(40, heads=4)[name]
    options["key_mask"] = torch.rand(2, 40) > 0.2
    grad = torch.randn(2, 40, 4, 5, dtype=dtype)
    out, found = gradients(lambda *t: cosformer.softmax_attention(*t, **options), tensors, grad)
    expected_out, expected = gradients(
        lambda *t: definition(*t, **options), [t.double() for t in tensors], grad.double()
    )
    assert out.dtype == dtype
    assert relative(out, expected_out) < LIMIT[dtype]
    for a, b in zip(found, expected, strict=True):
        assert relative(a, b) < 4 * LIMIT[dtype]


@pytest.mark.parametrize("name", PATTERNS)
def test_values_far_apart_and_a_bias(name):
    """Scores of hundreds, a scale and a bias of its own."""
    q, k, v = inputs(q_len=30, heads=2, dim=8, dtype=torch.float32)
    bias = torch.randn(2, 2 * 12 + 1) * 3
    options = patterns(30)[name] | {"scale": 2.5, "relative_bias": bias}
    out = cosformer.softmax_attention(q * 10, k * 3, v, **options)
    doubles = [t.double() for t in (q * 10, k * 3, v)]
    # A score of 1e3 has an error of 1e-4 in float32.
    assert relative(out, definition(*doubles, **options)) < 2e-4


@pytest.mark.parametrize("length", [0, 1, 2, 63, 64, 65, 255, 257, 913])
@pytest.mark.parametrize("is_causal", [False, True])
def test_behaviour_16_lengths(length, is_causal):
    q, k, v = inputs(batch=1, q_len=length, heads=1, dim=8)
    grad = torch.randn_like(q)
    out, found = gradients(
        lambda *t: cosformer.softmax_attention(*t, is_causal=is_causal), (q, k, v), grad
    )

    def plain(q, k, v):
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)

    expected_out, expected = gradients(plain, (q, k, v), grad)
    assert relative(out, expected_out) < 1e-11
    for a, b in zip(found, expected, strict=True):
        assert off_by(a, b, grad) < 1e-9


@pytest.mark.parametrize("dim", [1, 3, 40, 63, 192])
def test_behaviour_17_head_dims(dim):
    tensors = inputs(batch=1, q_len=20, dim=dim, value_dim=dim % 7 + 2, dtype=torch.float32)
    options = {"is_causal": True, "window": (6, 0)}
    out, found = gradients(lambda *t: cosformer.softmax_attention(*t, **options), tensors)
    expected_out, expected = gradients(
        lambda *t: definition(*t, **options), [t.double() for t in tensors]
    )
    assert relative(out, expected_out) < 3e-6
    for a, b in zip(found, expected, strict=True):
        assert off_by(a, b, out) < 1e-5


@pytest.mark.parametrize("name", PATTERNS)
def test_behaviour_1_values_of_one_give_one(name):
    q, k, _ = inputs(q_len=50, dim=8, dtype=torch.float32)
    ones = torch.ones(2, 50, 2, 3)
    options = patterns(50)[name]
    sees = visible(2, 2, 50, 50, **options).any(-1).permute(0, 2, 1)
    for out in (
        cosformer.softmax_attention(q, k, ones, **options),
        portable(q, k, ones, **options),
    ):
        torch.testing.assert_close(out[sees], torch.ones_like(out[sees]), rtol=0, atol=3e-6)
        assert (out[~sees] == 0).all()


def test_behaviour_3_scale_1e4():
    """Each row's weight is on one key: its value comes out, and nothing overflows."""
    q, k, v = inputs(q_len=100, dim=16, dtype=torch.float32)
    out, found = gradients(
        lambda *t: cosformer.softmax_attention(*t, is_causal=True), (q * 1e4, k * 1e4, v)
    )
    expected = definition(q.double() * 1e4, k.double() * 1e4, v, is_causal=True)
    assert out.isfinite().all() and all(t.isfinite().all() for t in found)
    assert relative(out, expected) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_behaviour_4_large_keys_in_half_precision(dtype):
    q, v = torch.randn(1, 1024, 1, 32).to(dtype), torch.randn(1, 1024, 1, 32).to(dtype)
    k = torch.full((1, 1024, 1, 32), 50.0, dtype=dtype)
    for is_causal in (False, True):
        out, found = gradients(
            lambda *t, c=is_causal: cosformer.softmax_attention(*t, is_causal=c), (q, k, v)
        )
        assert all(t.isfinite().all() for t in (out, *found))


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_behaviour_5_boolean_masks_and_dtypes(dtype):
    tensors = [t.requires_grad_() for t in inputs(q_len=9, dtype=dtype)]
    bias = torch.randn(2, 5, requires_grad=True)
    out = cosformer.softmax_attention(*tensors, key_mask=torch.rand(2, 9) > 0.3, relative_bias=bias)
    assert out.dtype == dtype
    out.sum().backward()
    assert all(t.grad.dtype == t.dtype for t in (*tensors, bias))


def portable(q, k, v, **options):
    """The path of devices without kernels."""
    from cosformer._softmax import _arguments

    return torch.ops.cosformer.softmax_attention_portable(*_arguments(q, k, v, **options), False)[0]


PATHS = {"kernels": cosformer.softmax_attention, "portable": portable}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_behaviour_7_a_row_that_sees_nothing_is_zero_with_zero_gradients(path, is_causal):
    q, k, v = inputs(q_len=6, dtype=torch.float32)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0] = False
    bias = torch.randn(2, 9)
    out, found = gradients(
        lambda *t: PATHS[path](*t[:3], relative_bias=t[3], key_mask=mask, is_causal=is_causal),
        (q, k, v, bias),
    )
    assert (out[0] == 0).all() and (out[1] != 0).any()
    assert all((t[0] == 0).all() for t in found[:3])
    assert all(t.isfinite().all() for t in found)
    # A query before every key.
    out, found = gradients(lambda *t: PATHS[path](*t, is_causal=True, kv_start=4), (q, k, v))
    assert (out[:, :4] == 0).all() and (found[0][:, :4] == 0).all()
    # No keys at all.
    out, found = gradients(lambda *t: PATHS[path](*t), (q, k[:, :0], v[:, :0]))
    assert out.shape == q.shape and (out == 0).all() and (found[0] == 0).all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("path", PATHS)
def test_behaviour_8_what_is_invisible_changes_no_bit(poison, name, path):
    q, k, v = inputs(batch=2, q_len=40, dim=8, dtype=torch.float32)
    grad = torch.randn_like(q)
    key_mask = torch.rand(2, 40) > 0.4
    query_mask = torch.rand(2, 40) > 0.4
    options = patterns(40)[name] | {"key_mask": key_mask, "query_mask": query_mask}
    call = lambda *t: PATHS[path](*t, **options)  # noqa: E731
    expected_out, expected = gradients(call, (q, k, v), grad)
    poisoned = [t.clone() for t in (q, k, v)]
    poisoned[0][~query_mask] = poison
    poisoned[1][~key_mask] = poison
    poisoned[2][~key_mask] = poison
    grad[~query_mask] = poison
    out, found = gradients(call, poisoned, grad)
    assert torch.equal(out, expected_out)
    assert (out[~query_mask] == 0).all()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


# By name the portable path does not know what will come back: its operator does (ops_test).
POISONED = [
    (p, w) for p in PATHS for w in ("q", "k", "v", "grad") if (p, w) != ("portable", "grad")
]


@pytest.mark.parametrize(("path", "which"), POISONED)
@pytest.mark.parametrize("name", PATTERNS)
def test_a_visible_nan_reaches_exactly_what_sees_it(path, which, name):
    tensors = dict(zip("qkv", inputs(batch=2, q_len=40, dim=8, dtype=torch.float32), strict=True))
    tensors["grad"] = torch.randn_like(tensors["q"])
    options = patterns(40)[name]

    def run():
        leaves = [tensors[n] for n in "qkv"]
        out, found = gradients(lambda *t: PATHS[path](*t, **options), leaves, tensors["grad"])
        return dict(zip(("out", "dq", "dk", "dv"), (out, *found), strict=True))

    clean = run()
    tensors[which][1, 17, 0, :] = float("nan")
    found = run()
    sees = visible(2, 2, 40, 40, **options)
    rows = torch.zeros(2, 40, 2, dtype=torch.bool)  # of queries that it reaches
    if which in ("q", "grad"):
        rows[1, 17, 0] = sees[1, 0, 17].any()
    else:
        rows[1, :, 0] = sees[1, 0, :, 17]
    limit = 0 if path == "kernels" else 1e-5
    if which != "grad":
        assert found["out"][rows].isnan().all()
    else:
        assert torch.equal(found["out"], clean["out"])
    untouched = ~rows
    torch.testing.assert_close(
        found["out"][untouched], clean["out"][untouched], rtol=limit, atol=limit
    )
    torch.testing.assert_close(
        found["dq"][untouched], clean["dq"][untouched], rtol=limit, atol=limit
    )
    # Keys that no such row sees keep their gradients.
    keys = ~(sees & rows.permute(0, 2, 1)[..., None]).any(2).permute(0, 2, 1)
    for name in ("dk", "dv"):
        torch.testing.assert_close(found[name][keys], clean[name][keys], rtol=limit, atol=limit)


def test_behaviour_9_a_window_that_lies_wholly_inside_padding():
    q, k, v = inputs(q_len=30, dtype=torch.float32)
    mask = torch.arange(30).expand(2, 30) < 10
    for t in (k, v):
        t[~mask] = float("nan")
    for options in ({"window": (3, 3)}, {"window": (3, 0), "is_causal": True}):
        out, found = gradients(
            lambda *t, o=options: cosformer.softmax_attention(*t, key_mask=mask, **o), (q, k, v)
        )
        assert out.isfinite().all() and all(t.isfinite().all() for t in found)
        assert (out[:, 13:] == 0).all() and (out[:, :10] != 0).any(-1).all()


def test_the_future_changes_no_bit_of_the_past():
    for name in ("causal", "window_causal", "window_global_causal", "all"):
        q, k, v = inputs(q_len=100, dim=16, dtype=torch.float32)
        options = patterns(100)[name]
        out = cosformer.softmax_attention(q, k, v, **options)
        for t in (q, k, v):
            t[:, 63:] = torch.randn_like(t[:, 63:]) * 100
        again = cosformer.softmax_attention(q, k, v, **options)
        assert torch.equal(again[:, :63], out[:, :63])


@pytest.mark.parametrize("lengths", [(3, 5), (5, 3), (1, 5)])
def test_behaviour_11_causal_with_unequal_lengths_goes_by_positions(lengths):
    tensors = inputs(q_len=lengths[0], kv_len=lengths[1])
    for starts in ({}, {"q_start": 2}, {"q_start": 1, "kv_start": 2}):
        for options in ({}, {"window": (1, 0)}, {"global_mask": tokens(2, lengths[1], 1)}):
            options = options | starts | {"is_causal": True}
            out = cosformer.softmax_attention(*tensors, **options)
            torch.testing.assert_close(out, definition(*tensors, **options), rtol=1e-12, atol=1e-13)


def test_behaviour_12_alignment_is_explicit():
    q, k, v = inputs(batch=1, q_len=1, kv_len=8)
    first = cosformer.softmax_attention(q, k, v, is_causal=True, q_start=0)
    torch.testing.assert_close(first, v[:, :1])
    last = cosformer.softmax_attention(q, k, v, is_causal=True, q_start=7)
    torch.testing.assert_close(last, cosformer.softmax_attention(q, k, v))


def test_starts_as_ints_and_tensors_and_rows():
    tensors = inputs(q_len=4, kv_len=9)
    options = {"is_causal": True, "window": (4, 0)}
    by_int = cosformer.softmax_attention(*tensors, q_start=5, kv_start=1, **options)
    again = cosformer.softmax_attention(
        *tensors, q_start=torch.tensor(5), kv_start=torch.tensor([1, 1]), **options
    )
    assert torch.equal(by_int, again)
    starts = torch.tensor([5, 2])
    out = cosformer.softmax_attention(*tensors, q_start=starts, **options)
    torch.testing.assert_close(
        out, definition(*tensors, q_start=starts, **options), rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize("length", [1, 2, 5, 70])
@pytest.mark.parametrize("window", [(0, 0), (3, 1), (64, 64), (1000, 1000), (-1, 2), (2, -1)])
@pytest.mark.parametrize("dilation", [1, 4])
def test_behaviour_20_any_length_against_any_window(length, window, dilation):
    tensors = inputs(batch=1, q_len=length, heads=1)
    for is_causal in (False, True):
        options = {"window": window, "dilation": dilation, "is_causal": is_causal}
        out = cosformer.softmax_attention(*tensors, **options)
        torch.testing.assert_close(out, definition(*tensors, **options), rtol=1e-11, atol=1e-12)


def test_behaviour_30_twice_is_identical():
    tensors = inputs(q_len=300, dim=32, dtype=torch.float32)
    options = {"is_causal": True, "dropout_p": 0.2, "dropout_seed": 3}
    call = lambda *t: cosformer.softmax_attention(*t, **options)  # noqa: E731
    first, second = gradients(call, tensors), gradients(call, tensors)
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


# Dropout.


def kept_weights(batch, heads, q_len, kv_len, p, seed):
    """[batch, heads, q_len, kv_len]: what dropout multiplies weights with, seen from outside: rows
    whose weights are all alike, and unit vectors for values."""
    q = torch.zeros(batch, q_len, heads, 1, dtype=torch.float64)
    k = torch.zeros(batch, kv_len, heads, 1, dtype=torch.float64)
    unit = torch.eye(kv_len, dtype=torch.float64)[None, :, None, :]
    out = cosformer.softmax_attention(
        q, k, unit.expand(batch, -1, heads, -1), dropout_p=p, dropout_seed=seed
    )
    return out.permute(0, 2, 1, 3) * kv_len


def test_dropout_is_seeded_and_right_in_the_mean():
    kept = kept_weights(2, 3, 60, 70, 0.3, 11)
    assert torch.equal(kept, kept_weights(2, 3, 60, 70, 0.3, 11))
    assert (kept != kept_weights(2, 3, 60, 70, 0.3, 12)).any()
    values = kept.unique()
    torch.testing.assert_close(values, torch.tensor([0, 1 / 0.7], dtype=torch.float64))
    # 25,200 draws: a share of 0.3 within 5 standard deviations.
    assert abs((kept == 0).double().mean() - 0.3) < 5 * (0.21 / kept.numel()) ** 0.5
    # Rows, heads and queries are dropped independently.
    for dim in range(3):
        a, b = kept.select(dim, 0), kept.select(dim, 1)
        assert abs(((a == 0) == (b == 0)).double().mean() - 0.58) < 5 * (0.25 / a.numel()) ** 0.5


@pytest.mark.parametrize("name", PATTERNS)
def test_dropout_and_its_gradients_are_those_of_the_definition(name):
    tensors = inputs(q_len=40, heads=2)
    kept = kept_weights(2, 2, 40, 40, 0.25, 5)
    options = patterns(40)[name]
    drop = {"dropout_p": 0.25, "dropout_seed": torch.tensor(5)}
    grad = torch.randn_like(tensors[0])
    expected_out, expected = gradients(
        lambda *t: definition(*t, kept=kept, **options), tensors, grad
    )
    for path in PATHS.values():
        out, found = gradients(lambda *t, p=path: p(*t, **options, **drop), tensors, grad)
        assert relative(out, expected_out) < 1e-12
        for a, b in zip(found, expected, strict=True):
            assert relative(a, b) < 1e-11


def test_dropout_is_the_same_in_any_split():
    q, k, v = inputs(q_len=130, dim=8, dtype=torch.float32)
    drop = {"dropout_p": 0.5, "dropout_seed": 9, "is_causal": True}
    out = cosformer.softmax_attention(q, k, v, **drop)
    for split in (1, 50, 64, 129):
        parts = [
            cosformer.softmax_attention(q[:, :split], k[:, :split], v[:, :split], **drop),
            cosformer.softmax_attention(q[:, split:], k, v, q_start=split, **drop),
        ]
        assert relative(torch.cat(parts, 1), out) < 1e-6


def test_dropout_of_packed_sequences_goes_by_sequence():
    q, k, v = inputs(batch=2, q_len=20, dim=8)
    drop = {"dropout_p": 0.5, "dropout_seed": 9}
    out = cosformer.softmax_attention(q, k, v, **drop)
    packed = [t.flatten(0, 1)[None] for t in (q, k, v)]
    again = cosformer.softmax_attention(*packed, cu_seqlens_q=torch.tensor([0, 20, 40]), **drop)
    assert relative(again[0].view_as(out), out) < 1e-12
