"""Wrong input is an error that says what was found and what was expected (behaviours 14, 45)."""

import cosformer
import pytest
import torch
from helpers import inputs

TENSORS = inputs(q_len=5, kv_len=6, heads=6, kv_heads=2, dim=4, value_dim=3, dtype=torch.float32)
Q, K, V = TENSORS
BOOL = torch.ones(2, 6, dtype=torch.bool)

CASES = {
    "query has 6.*key has 4 heads, query has 6: query heads must be a multiple|"
    "key has 4 heads, query has 6: query heads must be a multiple": (
        (Q, K.repeat(1, 1, 2, 1), V.repeat(1, 1, 2, 1)),
        {},
    ),
    "query has head_dim 4, key has 3": ((Q, K[..., :3], V), {}),
    "key has length 6, value has length 5": ((Q, K, V[:, :5]), {}),
    "key has 2 heads, value has 1": ((Q, K, V[:, :, :1]), {}),
    "query has batch 2, key 1, value 1": ((Q, K[:1], V[:1]), {}),
    r"query has shape \[2, 5, 24\], expected \[batch, q_len, heads, head_dim\]": (
        (Q.flatten(2), K, V),
        {},
    ),
    "query is Float, key Double, value Float: expected one dtype": ((Q, K.double(), V), {}),
    "query is Long, expected a floating dtype": ((Q.long(), K.long(), V.long()), {}),
    "query is on cpu, key on meta": ((Q, K.to("meta"), V), {}),
    "query has 0 heads": ((Q[:, :, :0], K, V), {}),
    "head_dim is 0": ((Q[..., :0], K[..., :0], V), {}),
    r"key_mask is Float, expected bool \[batch, kv_len\]": (TENSORS, {"key_mask": BOOL.float()}),
    r"key_mask has shape \[2, 5\], expected \[batch, kv_len\] = \[2, 6\]": (
        TENSORS,
        {"key_mask": BOOL[:, :5]},
    ),
    r"query_mask has shape \[2, 6\], expected \[batch, q_len\] = \[2, 5\]": (
        TENSORS,
        {"query_mask": BOOL},
    ),
    "key_mask and cu_seqlens_q are both given": (
        [t[:1] for t in TENSORS],
        {
            "key_mask": BOOL[:1],
            "cu_seqlens_q": torch.tensor([0, 5]),
            "cu_seqlens_k": torch.tensor([0, 6]),
        },
    ),
    "query has batch 2, packed sequences": (TENSORS, {"cu_seqlens_q": torch.tensor([0, 5])}),
    "cu_seqlens_k is given without cu_seqlens_q": (TENSORS, {"cu_seqlens_k": torch.tensor([0])}),
    "cu_seqlens_q is Float, expected int32 or int64": (
        [t[:1] for t in TENSORS],
        {"cu_seqlens_q": torch.tensor([0.0, 5.0])},
    ),
    "cu_seqlens_q has 1 sequences, cu_seqlens_k has 2": (
        [t[:1] for t in TENSORS],
        {"cu_seqlens_q": torch.tensor([0, 5]), "cu_seqlens_k": torch.tensor([0, 2, 6])},
    ),
    "cu_seqlens_k ends with 5, expected the number of tokens, 6": (
        [t[:1] for t in TENSORS],
        {"cu_seqlens_q": torch.tensor([0, 5])},
    ),
    "cu_seqlens_q starts with 1, expected 0": (
        [t[:1] for t in (Q, K[:, :5], V[:, :5])],
        {"cu_seqlens_q": torch.tensor([1, 5])},
    ),
    "offsets must not decrease": (
        [t[:1] for t in (Q, K[:, :5], V[:, :5])],
        {"cu_seqlens_q": torch.tensor([0, 4, 3, 5])},
    ),
    r"q_start is Int, expected int64": (TENSORS, {"q_start": torch.tensor(1, dtype=torch.int32)}),
    r"kv_start has shape \[3\], expected \[\] or \[rows\] = \[2\]": (
        TENSORS,
        {"kv_start": torch.tensor([1, 2, 3])},
    ),
    "unknown normalizer 'softmax': expected 'sum' or 'none'": (TENSORS, {"normalizer": "softmax"}),
    "reweight_len is 0, expected at least 1": (TENSORS, {"reweight_len": 0}),
    "eps is 0, expected > 0": (TENSORS, {"eps": 0.0}),
    "rotary_base is 0, expected above 0": (TENSORS, {"rotary_base": 0.0}),
    "head_dim is 3, rotary positions need an even one": (
        (Q[..., :3], K[..., :3], V),
        {"rotary_base": 9.0},
    ),
    "sees the key at position 5, 5 apart, but reweight_len is 4": (TENSORS, {"reweight_len": 4}),
}


@pytest.mark.parametrize("message", CASES)
def test_wrong_input(message):
    tensors, options = CASES[message]
    with pytest.raises(
        RuntimeError, match=f"linear_attention: .*({message})|linear_attention: {message}"
    ):
        cosformer.linear_attention(*tensors, **options)


def test_behaviour_14_a_mask_of_the_wrong_length_names_both_sizes():
    with pytest.raises(RuntimeError, match=r"\[2, 5\], expected \[batch, kv_len\] = \[2, 6\]"):
        cosformer.linear_attention(*TENSORS, key_mask=BOOL[:, :5])


def test_behaviour_15_tokens_beyond_the_last_offset_are_an_error():
    tensors = inputs(batch=1, q_len=6)
    with pytest.raises(RuntimeError, match="cu_seqlens_q ends with 5, expected .* 6"):
        cosformer.linear_attention(*tensors, cu_seqlens_q=torch.tensor([0, 2, 5]))


@pytest.mark.parametrize("function", ["linear_attention", "cosformer_attention"])
def test_behaviour_45_key_padding_mask_is_refused_with_an_explanation(function):
    options = {"reweight_len": 9, "key_padding_mask": BOOL}
    with pytest.raises(ValueError, match="True means ignore.*key_mask=~key_padding_mask"):
        getattr(cosformer, function)(*TENSORS, **options)


def test_more_than_m_apart_is_an_error_padding_included():
    """At nominal positions: a mask that hides the far key does not help."""
    mask = BOOL.clone()
    mask[:, 3:] = False
    with pytest.raises(RuntimeError, match="5 apart, but reweight_len is 4"):
        cosformer.linear_attention(*TENSORS, key_mask=mask, reweight_len=4)
    # Decoding past M is the same error.
    q, k, v = inputs(q_len=5)
    options = {"is_causal": True, "reweight_len": 4}
    _, state = cosformer.linear_attention(q, k, v, return_state=True, **options)
    token = [t[:, :1] for t in (q, k, v)]
    for step in (
        lambda: cosformer.linear_attention(*token, state=state, **options),
        lambda: cosformer.linear_attention_decode_step_(*token, state),
    ):
        with pytest.raises(RuntimeError, match="5 apart, but reweight_len is 4"):
            step()


def test_cosformer_attention_needs_m():
    with pytest.raises(TypeError, match="reweight_len"):
        cosformer.cosformer_attention(*TENSORS)
    with pytest.raises(ValueError, match="reweight_len is None: give the model's M"):
        cosformer.cosformer_attention(*TENSORS, reweight_len=None)


def test_a_float_is_no_start():
    with pytest.raises(TypeError, match="q_start is 1.5, expected an int or an int64 tensor"):
        cosformer.linear_attention(*TENSORS, q_start=1.5)


def test_rotary_and_sinusoidal_errors():
    x = torch.randn(2, 5, 3, 4)
    positions = torch.zeros(2, 5, dtype=torch.int64)
    for message, call in {
        "x has 3 dimensions, expected 4": lambda: cosformer.apply_rotary(x[0]),
        "dim is 3, expected an even number": lambda: cosformer.apply_rotary(x[..., :3]),
        "x is Long, expected a floating dtype": lambda: cosformer.apply_rotary(x.long()),
        "base is 0, expected > 0": lambda: cosformer.apply_rotary(x, base=0.0),
        r"positions have shape \[2, 4\], expected \[batch, seq\] = \[2, 5\]": (
            lambda: cosformer.apply_rotary(x, positions=positions[:, :4])
        ),
        "positions are Int, expected int64": (
            lambda: cosformer.apply_rotary(x, positions=positions.int())
        ),
        "start is 3 and positions are given": (
            lambda: cosformer.apply_rotary(x, positions=positions, start=3)
        ),
        "dim is 3: expected .* an even dim": lambda: cosformer.sinusoidal_positions(4, 3),
    }.items():
        with pytest.raises(RuntimeError, match=message):
            call()


def test_the_backward_operator_checks_its_gradients():
    q, k, v = inputs(dtype=torch.float32)
    ops = torch.ops.cosformer
    rest = (None,) * 10
    options = ("relu", None, False, "sum", 1e-6, None, False)
    needs = [True] * 3 + [False] * 2
    out = torch.zeros_like(q)
    denominator = torch.zeros(2, 7, 2)
    for message, d_out, den in (
        (
            r"d_out is Float \[2, 7, 2, 3\], expected Float \[2, 7, 2, 4\]",
            out[..., :3],
            denominator,
        ),
        (r"denominator is Float \[2, 6, 2\], expected", out, denominator[:, :6]),
        (r"denominator is Double .*, expected Float", out, denominator.double()),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.linear_attention_backward(
                d_out, None, None, out, den, needs, q, k, v, *rest, *options
            )
