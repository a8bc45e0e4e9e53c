"""Values against the definition, and what holds for any (behaviours 1-12, 16, 17, 30, 44)."""

import cosformer
import pytest
import torch
from helpers import definition, gradients, inputs, off_by, relative

LIMIT = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}
OPTIONS = {
    "relu": {},
    "cosine": {"reweight_len": 1000},
    "elu1_cosine": {"feature_map": "elu1", "reweight_len": 1000},
    "elu1_rotary": {"feature_map": "elu1", "rotary_base": 100.0},
}


def positive(*sizes, dtype=torch.float32):
    return torch.rand(*sizes, dtype=dtype) + 0.1


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_against_the_definition(dtype, name, is_causal):
    tensors = inputs(q_len=70, kv_len=65, heads=4, kv_heads=2, dim=8, value_dim=5, dtype=dtype)
    out = cosformer.linear_attention(*tensors, is_causal=is_causal, **OPTIONS[name])
    expected = definition(*tensors, is_causal=is_causal, **OPTIONS[name])
    assert relative(out, expected) < LIMIT[dtype]


@pytest.mark.parametrize("length", [0, 1, 2, 63, 64, 65, 255, 257, 913])
@pytest.mark.parametrize("is_causal", [False, True])
def test_behaviour_16_lengths(length, is_causal):
    q, k, v = inputs(batch=1, q_len=length, heads=1, dim=8)
    grad = torch.randn_like(q)
    options = {"reweight_len": 1000, "is_causal": is_causal}
    out, found = gradients(lambda *t: cosformer.linear_attention(*t, **options), (q, k, v), grad)
    expected_out, expected = gradients(lambda *t: definition(*t, **options), (q, k, v), grad)
    assert relative(out, expected_out) < 1e-11
    for a, b in zip(found, expected, strict=True):
        assert off_by(a, b, grad) < 1e-9


@pytest.mark.parametrize("dim", [1, 3, 40, 63, 192])
def test_behaviour_17_head_dims(dim):
    q, k, v = inputs(batch=1, q_len=20, dim=dim, value_dim=dim % 7 + 2, dtype=torch.float32)
    options = {"reweight_len": 30, "is_causal": True, "feature_map": "elu1"}
    out, found = gradients(lambda *t: cosformer.linear_attention(*t, **options), (q, k, v))
    expected_out, expected = gradients(
        lambda *t: definition(*t, **options), [t.double() for t in (q, k, v)]
    )
    assert relative(out, expected_out) < 3e-6
    for a, b in zip(found, expected, strict=True):
        assert off_by(a, b, out) < 1e-5


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_behaviour_1_values_of_one_give_one(name, is_causal):
    options = OPTIONS[name] | {"rotary_base": None}
    q, k, v = positive(2, 90, 2, 8), positive(2, 90, 2, 8), torch.ones(2, 90, 2, 3)
    paths = [
        cosformer.linear_attention(q, k, v, is_causal=is_causal, **options),
        definition(q, k, v, is_causal=is_causal, **options),
    ]
    if is_causal:
        state, steps = None, []
        for t in range(90):
            token = [x[:, t : t + 1] for x in (q, k, v)]
            out, state = cosformer.linear_attention(
                *token, is_causal=True, state=state, return_state=True, **options
            )
            steps.append(out)
        paths.append(torch.cat(steps, 1))
    for out in paths:
        torch.testing.assert_close(
            out.double(), torch.ones(2, 90, 2, 3).double(), rtol=0, atol=3e-6
        )


def test_behaviour_2_features_that_may_be_negative():
    with pytest.raises(RuntimeError, match="unknown feature_map 'tanh': expected 'relu', 'elu1'"):
        cosformer.linear_attention(*inputs(), feature_map="tanh")
    assert "non-negative" in cosformer.linear_attention.__doc__
    tensors = [positive(1, 9, 1, 4) for _ in range(3)]
    out = cosformer.linear_attention(*tensors, feature_map="identity")
    assert relative(out, definition(*tensors, feature_map="identity")) < 3e-6


@pytest.mark.parametrize("name", ["relu", "cosine", "elu1_cosine"])
def test_behaviour_3_scale_1e4(name):
    q, k, v = inputs(q_len=100, dim=16, dtype=torch.float32)
    q, k = q * 1e4, k * 1e4
    options = OPTIONS[name] | {"is_causal": True}
    out, found = gradients(lambda *t: cosformer.linear_attention(*t, **options), (q, k, v))
    expected_out, expected = gradients(
        lambda *t: definition(*t, **options), [t.double() for t in (q, k, v)]
    )
    assert out.isfinite().all() and relative(out, expected_out) < 3e-6
    for a, b in zip(found, expected, strict=True):
        assert a.isfinite().all() and relative(a, b) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_behaviour_4_large_keys_in_half_precision(dtype):
    q, v = torch.randn(1, 8192, 1, 32).to(dtype), torch.randn(1, 8192, 1, 32).to(dtype)
    k = torch.full((1, 8192, 1, 32), 50.0, dtype=dtype)
    for is_causal in (False, True):
        out, found = gradients(
            lambda *t, c=is_causal: cosformer.linear_attention(*t, is_causal=c, reweight_len=8192),
            (q, k, v),
        )
        assert all(t.isfinite().all() for t in (out, *found))


def test_behaviour_7_a_row_that_sees_nothing_is_zero_with_zero_gradients():
    q, k, v = inputs(q_len=6, dtype=torch.float32)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0] = False
    for options in ({}, {"is_causal": True, "feature_map": "elu1"}, {"reweight_len": 9}):
        out, found = gradients(
            lambda *t, o=options: cosformer.linear_attention(*t, key_mask=mask, **o), (q, k, v)
        )
        assert (out[0] == 0).all() and (out[1] != 0).any()
        assert all((t[0] == 0).all() for t in found)
    # A query before every key, and features that are all zero.
    out, found = gradients(
        lambda *t: cosformer.linear_attention(*t, is_causal=True, kv_start=4), (q, k, v)
    )
    assert (out[:, :4] == 0).all() and (found[0][:, :4] == 0).all()
    out, found = gradients(lambda *t: cosformer.linear_attention(*t), (-q.abs(), k, v))
    assert (out == 0).all() and all((t == 0).all() for t in found)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["cosine", "elu1_rotary"])
@pytest.mark.parametrize("path", ["kernels", "portable"])
def test_behaviour_8_what_is_invisible_changes_no_bit(poison, is_causal, name, path):
    q, k, v = inputs(batch=2, q_len=40, dim=8, dtype=torch.float32)
    grad = torch.randn_like(q)
    key_mask = torch.rand(2, 40) > 0.4
    query_mask = torch.rand(2, 40) > 0.4
    options = OPTIONS[name]

    def call(q, k, v):
        if path == "kernels":
            return cosformer.linear_attention(
                *(q, k, v),
                is_causal=is_causal,
                key_mask=key_mask,
                query_mask=query_mask,
                **options,
            )
        feature_map = options.get("feature_map", "relu")
        return torch.ops.cosformer.linear_attention_portable(
            *(q, k, v, None, None, key_mask, query_mask),
            *(None,) * 6,
            *(feature_map, options.get("reweight_len"), is_causal, "sum", 1e-6),
            *(options.get("rotary_base"), False, "linear", feature_map, 0, 0.0, False),
            *(False, False),
        )[0]

    expected_out, expected = gradients(call, (q, k, v), grad)
    poisoned = [t.clone() for t in (q, k, v)]
    poisoned[0][~query_mask] = poison
    poisoned[1][~key_mask] = poison
    poisoned[2][~key_mask] = poison
    out, found = gradients(call, poisoned, grad)
    assert torch.equal(out, expected_out)
    assert (out[~query_mask] == 0).all()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("at", [0, 17, 39])
@pytest.mark.parametrize("name", ["cosine", "elu1_rotary"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_visible_nan_reaches_exactly_the_rows_that_see_it(at, name, which):
    tensors = inputs(batch=2, q_len=40, dim=8, dtype=torch.float32)
    clean = cosformer.linear_attention(*tensors, is_causal=True, **OPTIONS[name])
    tensors[which][1, at, 0, :] = float("nan")
    out = cosformer.linear_attention(*tensors, is_causal=True, **OPTIONS[name])
    sees = torch.zeros(2, 40, 2, dtype=torch.bool)
    sees[1, at : (at + 1 if which == 0 else None), 0] = True
    assert out[sees].isnan().all()
    assert torch.equal(out[~sees], clean[~sees])


def test_the_future_changes_no_bit_of_the_past():
    q, k, v = inputs(q_len=100, dim=16, dtype=torch.float32)
    options = {"is_causal": True, "reweight_len": 128}
    out = cosformer.linear_attention(q, k, v, **options)
    for t in (q, k, v):
        t[:, 63:] = torch.randn_like(t[:, 63:]) * 100
    assert torch.equal(cosformer.linear_attention(q, k, v, **options)[:, :63], out[:, :63])


@pytest.mark.parametrize("lengths", [(3, 5), (5, 3), (1, 5)])
def test_behaviour_11_causal_with_unequal_lengths_goes_by_positions(lengths):
    tensors = inputs(q_len=lengths[0], kv_len=lengths[1])
    for options in ({}, {"q_start": 2}, {"q_start": 1, "kv_start": 2}):
        out = cosformer.linear_attention(*tensors, is_causal=True, reweight_len=9, **options)
        expected = definition(*tensors, is_causal=True, reweight_len=9, **options)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)


def test_behaviour_12_alignment_is_explicit():
    q, k, v = inputs(batch=1, q_len=1, kv_len=8)
    q, k = q.abs() + 0.1, k.abs() + 0.1
    first = cosformer.linear_attention(q, k, v, is_causal=True, q_start=0)
    torch.testing.assert_close(first, v[:, :1])
    last = cosformer.linear_attention(q, k, v, is_causal=True, q_start=7)
    torch.testing.assert_close(last, cosformer.linear_attention(q, k, v))


def test_starts_as_ints_and_tensors_and_rows():
    tensors = inputs(q_len=4, kv_len=9)
    options = {"is_causal": True, "reweight_len": 30}
    by_int = cosformer.linear_attention(*tensors, q_start=5, kv_start=1, **options)
    scalar = torch.tensor(5)
    rows = torch.tensor([1, 1])
    again = cosformer.linear_attention(*tensors, q_start=scalar, kv_start=rows, **options)
    assert torch.equal(by_int, again)
    starts = torch.tensor([5, 2])
    out = cosformer.linear_attention(*tensors, q_start=starts, **options)
    for row in range(2):
        alone = [t[row : row + 1] for t in tensors]
        expected = cosformer.linear_attention(*alone, q_start=int(starts[row]), **options)
        assert relative(out[row], expected[0]) < 1e-12


def test_behaviour_30_twice_is_identical():
    tensors = inputs(q_len=300, dim=32, dtype=torch.float32)
    call = lambda *t: cosformer.cosformer_attention(*t, reweight_len=300, is_causal=True)  # noqa: E731
    first, second = gradients(call, tensors), gradients(call, tensors)
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


def test_the_attention_matrix_of_no_keys():
    q, k, _ = inputs(q_len=3, kv_len=0, heads=2, kv_heads=1)
    assert cosformer.attention_matrix("linear", q, k).shape == (2, 2, 3, 0)


@pytest.mark.parametrize("kind", ["linear", "cosformer"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_behaviour_44_the_attention_matrix(kind, is_causal):
    q, k, v = inputs(q_len=9, kv_len=12, heads=4, kv_heads=2)
    options = {"is_causal": is_causal, "q_start": 3, "key_mask": torch.rand(2, 12) > 0.2}
    if kind == "cosformer":
        options["reweight_len"] = 40
    else:
        options["feature_map"] = "elu1"
    matrix = cosformer.attention_matrix(kind, q, k, **options)
    assert matrix.shape == (2, 4, 9, 12)
    out, _, denominator = cosformer.linear_attention_with_denominator(q, k, v, **options)
    wide = v.repeat_interleave(2, dim=2)
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", matrix, wide), out)
    sums = matrix.sum(-1).permute(0, 2, 1)
    torch.testing.assert_close(
        sums[denominator >= 1e-6], torch.ones_like(sums[denominator >= 1e-6])
    )
    assert (matrix.permute(0, 3, 1, 2)[~options["key_mask"]] == 0).all()


def test_denominators_are_the_sums_of_weights():
    q, k, v = inputs(dtype=torch.float32)
    options = {"is_causal": True, "reweight_len": 20}
    out, state, denominator = cosformer.linear_attention_with_denominator(q, k, v, **options)
    assert state is None and not denominator.requires_grad
    unnormalized = definition(q, k, torch.ones_like(v), normalizer="none", **options)[..., 0]
    assert relative(denominator, unnormalized) < 3e-6
    none = cosformer.linear_attention_with_denominator(q, k, v, normalizer="none", **options)
    assert none[2].numel() == 0
    assert relative(none[0], definition(q, k, v, normalizer="none", **options)) < 3e-6
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, _, denominator = cosformer.linear_attention_with_denominator(*leaves, **options)
    assert out.requires_grad and not denominator.requires_grad


def test_cosformer_attention_is_linear_attention_with_relu_and_the_cosine():
    tensors = inputs()
    out, state = cosformer.cosformer_attention(*tensors, reweight_len=9, return_state=True)
    expected, other = cosformer.linear_attention(
        *tensors, feature_map="relu", reweight_len=9, return_state=True
    )
    assert torch.equal(out, expected) and state[4:] == other[4:]


def test_reweight_len_is_not_taken_from_the_call():
    """Padding a call does not change its weights: M is a constant."""
    q, k, v = inputs(q_len=8)
    out = cosformer.cosformer_attention(q, k, v, reweight_len=50, is_causal=True)
    padded = [torch.cat([t, torch.randn_like(t)], 1) for t in (q, k, v)]
    again = cosformer.cosformer_attention(*padded, reweight_len=50, is_causal=True)
    torch.testing.assert_close(again[:, :8], out, rtol=1e-12, atol=1e-13)
