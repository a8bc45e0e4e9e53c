"""Wrong input to softmax attention is an error that says what was found and what was expected
(behaviours 14, 45)."""

import cosformer
import pytest
import torch
from helpers import inputs

TENSORS = inputs(q_len=5, kv_len=6, heads=6, kv_heads=2, dim=4, value_dim=3, dtype=torch.float32)
Q, K, V = TENSORS
BOOL = torch.ones(2, 6, dtype=torch.bool)
BLOCKS = torch.ones(1, 2, 2, dtype=torch.bool)
ONE = [t[:1] for t in TENSORS]
PACKED = {"cu_seqlens_q": torch.tensor([0, 5]), "cu_seqlens_k": torch.tensor([0, 6])}

CASES = {
    "key has 4 heads, query has 6: query heads must be a multiple": (
        (Q, K.repeat(1, 1, 2, 1), V.repeat(1, 1, 2, 1)),
        {},
    ),
    "query has head_dim 4, key has 3": ((Q, K[..., :3], V), {}),
    "key has length 6, value has length 5": ((Q, K, V[:, :5]), {}),
    r"query has shape \[2, 5, 24\], expected \[batch, q_len, heads, head_dim\]": (
        (Q.flatten(2), K, V),
        {},
    ),
    "query is Float, key Double, value Float: expected one dtype": ((Q, K.double(), V), {}),
    r"key_mask is Float, expected bool \[batch, kv_len\], true = takes part \(of additive masks": (
        TENSORS,
        {"key_mask": BOOL.float()},
    ),
    r"query_mask has shape \[2, 6\], expected \[batch, q_len\] = \[2, 5\]": (
        TENSORS,
        {"query_mask": BOOL},
    ),
    r"global_mask has shape \[2, 5\], expected \[batch, kv_len\] = \[2, 6\]": (
        TENSORS,
        {"global_mask": BOOL[:, :5]},
    ),
    "global_mask is Long, expected bool": (TENSORS, {"global_mask": BOOL.long()}),
    "key_mask and cu_seqlens_q are both given": (ONE, {"key_mask": BOOL[:1], **PACKED}),
    "query has batch 2, packed sequences": (TENSORS, {"cu_seqlens_q": torch.tensor([0, 5])}),
    "cu_seqlens_k ends with 5, expected the number of tokens, 6": (
        ONE,
        {"cu_seqlens_q": torch.tensor([0, 5])},
    ),
    "q_start is Int, expected int64": (TENSORS, {"q_start": torch.tensor(1, dtype=torch.int32)}),
    r"window is \(-2, 3\), expected keys to the left and to the right": (
        TENSORS,
        {"window": (-2, 3)},
    ),
    "dilation is 3 without a window": (TENSORS, {"dilation": 3}),
    "dilation is 0, expected >= 1": (TENSORS, {"dilation": 0, "window": (1, 1)}),
    "block_mask is given without block_size": (TENSORS, {"block_mask": BLOCKS}),
    "block_size is 4 without block_mask": (TENSORS, {"block_size": 4}),
    "block_size is 0, expected at least 1": (TENSORS, {"block_mask": BLOCKS, "block_size": 0}),
    "block_mask is Float, expected bool": (
        TENSORS,
        {"block_mask": BLOCKS.float(), "block_size": 4},
    ),
    r"block_mask has shape \[2, 2, 2\], expected \[heads or 1, q_blocks, kv_blocks\]": (
        TENSORS,
        {"block_mask": BLOCKS.expand(2, 2, 2), "block_size": 4},
    ),
    r"relative_bias has shape \[6, 4\], expected \[heads, 2 R \+ 1\] with 6 heads": (
        TENSORS,
        {"relative_bias": torch.zeros(6, 4)},
    ),
    r"relative_bias has shape \[2, 5\], expected": (TENSORS, {"relative_bias": torch.zeros(2, 5)}),
    "relative_bias is Long, expected a floating dtype": (
        TENSORS,
        {"relative_bias": torch.zeros(6, 5).long()},
    ),
    "dropout_p is 0.1 without dropout_seed": (TENSORS, {"dropout_p": 0.1}),
    "dropout_p is 1, expected at least 0 and below 1": (
        TENSORS,
        {"dropout_p": 1.0, "dropout_seed": 1},
    ),
    r"dropout_seed is Long \[1\], expected int64 \[\]": (
        TENSORS,
        {"dropout_p": 0.1, "dropout_seed": torch.tensor([1])},
    ),
    "scale is 0, expected a finite number other than 0": (TENSORS, {"scale": 0.0}),
    "scale is inf, expected": (TENSORS, {"scale": float("inf")}),
}


@pytest.mark.parametrize("message", CASES)
def test_wrong_input(message):
    tensors, options = CASES[message]
    with pytest.raises(RuntimeError, match=f"softmax_attention: {message}"):
        cosformer.softmax_attention(*tensors, **options)
    from cosformer._softmax import _arguments

    with pytest.raises(RuntimeError, match=f"softmax_attention: {message}"):
        torch.ops.cosformer.softmax_attention_portable(*_arguments(*tensors, **options), False)


def test_behaviour_14_a_mask_of_the_wrong_length_names_both_sizes():
    with pytest.raises(RuntimeError, match=r"\[2, 5\], expected \[batch, kv_len\] = \[2, 6\]"):
        cosformer.softmax_attention(*TENSORS, key_mask=BOOL[:, :5])


def test_a_window_that_is_no_pair():
    for window in (3, (1, 2, 3)):
        with pytest.raises(ValueError, match=r"window is .*, expected \(left, right\)"):
            cosformer.softmax_attention(*TENSORS, window=window)
    with pytest.raises(RuntimeError, match="window_right is missing, window_left is 2"):
        args = [*TENSORS, *(None,) * 10, False, None, 2, None, 1, None, 0.0, False]
        torch.ops.cosformer.softmax_attention(*args)


def test_behaviour_45_key_padding_mask_is_refused_with_an_explanation():
    mask = torch.ones(2, 7, dtype=torch.bool)
    tensors = inputs(dtype=torch.float32)
    projection = torch.randn(9, 3)
    calls = {
        "softmax_attention": (tensors, {}),
        "linformer_attention": ((*tensors, projection, projection), {}),
        "longformer_attention": (tensors * 2, {"window": (1, 1), "global_mask": mask}),
        "bigbird_attention": (tensors, {}),
    }
    for name, (args, options) in calls.items():
        with pytest.raises(
            ValueError, match=f"{name}: .*True means ignore.*key_mask=~key_padding_mask"
        ):
            getattr(cosformer, name)(*args, key_padding_mask=mask, **options)


def test_a_float_is_no_seed():
    with pytest.raises(TypeError, match="dropout_seed is 1.5, expected an int or an int64 tensor"):
        cosformer.softmax_attention(*TENSORS, dropout_p=0.1, dropout_seed=1.5)


def test_the_backward_operator_checks_its_gradients():
    from cosformer._softmax import _arguments

    q, k, v = inputs(dtype=torch.float32)
    needs = [True] * 3 + [False]
    out, lse = torch.zeros_like(q), torch.zeros(2, 7, 2)
    for message, d_out, sums in (
        (r"d_out is Float \[2, 7, 2, 3\], expected Float \[2, 7, 2, 4\]", out[..., :3], lse),
        (r"log_sum_exp is Float \[2, 6, 2\], expected", out, lse[:, :6]),
        ("log_sum_exp is Double .*, expected Float", out, lse.double()),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.cosformer.softmax_attention_backward(
                d_out, out, sums, needs, *_arguments(q, k, v)
            )
