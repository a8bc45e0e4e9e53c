"""Linformer, Longformer, BigBird, T5's bias, the attention matrix (behaviours 13, 15, 19, 21, 44),
and padding and packing of the softmax kinds."""

import cosformer
import pytest
import torch
from helpers import gradients, inputs, relative
from softmax_helpers import PATTERNS, definition, patterns, tokens, visible

# Padding and packing.


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("padding", [0.0, float("nan")])
def test_behaviour_13_a_padded_batch_equals_each_sequence_alone(name, padding):
    lengths = [40, 1, 17]
    tensors = inputs(batch=3, q_len=40, heads=2, dim=8, dtype=torch.float32)
    options = patterns(40, batch=3)[name]
    mask = torch.arange(40) < torch.tensor(lengths)[:, None]
    for t in tensors:
        t[~mask] = padding
    grad = torch.randn(3, 40, 2, 8)
    out, found = gradients(
        lambda *t: cosformer.softmax_attention(*t, key_mask=mask, query_mask=mask, **options),
        tensors,
        grad,
    )
    for row, length in enumerate(lengths):
        alone = [t[row : row + 1, :length] for t in tensors]
        own = dict(options)
        if "global_mask" in own:
            own["global_mask"] = own["global_mask"][row : row + 1, :length]
        expected_out, expected = gradients(
            lambda *t, o=own: cosformer.softmax_attention(*t, **o),
            alone,
            grad[row : row + 1, :length],
        )
        assert relative(out[row, :length], expected_out[0]) < 1e-6
        assert (out[row, length:] == 0).all()
        for a, b in zip(found, expected, strict=True):
            assert relative(a[row, :length], b[0]) < 1e-5
            assert (a[row, length:] == 0).all()


def packed_calls():
    """Calls of (tensors, the part of them that is one sequence or None, options)."""
    total = 36
    some = tokens(1, total, 0, 3, 6, 20)

    def softmax(options):
        def call(t, part, packing):
            own = dict(options)
            if "global_mask" in own:
                own["global_mask"] = some if part is None else some[:, part]
            return cosformer.softmax_attention(*t, **own, **packing)

        return 3, call

    def longformer(is_causal):
        def call(t, part, packing):
            globals_ = some if part is None else some[:, part]
            return cosformer.longformer_attention(
                *t, window=(3, 3), global_mask=globals_, is_causal=is_causal, **packing
            )

        return 6, call

    def bigbird(is_causal):
        def call(t, part, packing):
            return cosformer.bigbird_attention(
                *t, block_size=4, num_random_blocks=1, is_causal=is_causal, **packing
            )

        return 3, call

    calls = {name: softmax(options) for name, options in patterns(total, batch=1).items()}
    calls |= {"longformer": longformer(False), "longformer_causal": longformer(True)}
    return calls | {"bigbird": bigbird(False), "bigbird_causal": bigbird(True)}


@pytest.mark.parametrize("name", packed_calls())
def test_behaviour_15_packed_equals_each_sequence_alone(name):
    count, call = packed_calls()[name]
    offsets = [0, 5, 5, 35, 36]
    tensors = [
        t
        for _ in range(count // 3)
        for t in inputs(batch=1, q_len=36, heads=2, dim=8, dtype=torch.float32)
    ]
    grad = torch.randn(1, 36, 2, 8)
    packing = {"cu_seqlens_q": torch.tensor(offsets, dtype=torch.int32)}
    out, found = gradients(lambda *t: call(t, None, packing), tensors, grad)
    for begin, end in zip(offsets[:-1], offsets[1:], strict=True):
        part = slice(begin, end)
        expected_out, expected = gradients(
            lambda *t, p=part: call(t, p, {}), [t[:, part] for t in tensors], grad[:, part]
        )
        assert relative(out[:, part], expected_out) < 1e-6
        for a, b in zip(found, expected, strict=True):
            assert relative(a[:, part], b) < 1e-5
    # What another sequence holds changes no bit.
    for t in tensors:
        t[:, 5:35] = float("nan")
    again, poisoned = gradients(lambda *t: call(t, None, packing), tensors, grad)
    for begin, end in ((0, 5), (35, 36)):
        assert torch.equal(out[:, begin:end], again[:, begin:end])
        for a, b in zip(found, poisoned, strict=True):
            assert torch.equal(a[:, begin:end], b[:, begin:end])


def test_behaviour_15_tokens_beyond_the_last_offset_are_an_error():
    tensors = inputs(batch=1, q_len=6)
    options = {"window": (1, 1), "global_mask": tokens(1, 6, 0)}
    for function, count, own in (
        (cosformer.softmax_attention, 1, {}),
        (cosformer.longformer_attention, 2, options),
        (cosformer.bigbird_attention, 1, {}),
    ):
        with pytest.raises(RuntimeError, match="cu_seqlens_q .* 5, expected .* 6"):
            function(*tensors * count, cu_seqlens_q=torch.tensor([0, 2, 5]), **own)


# Linformer.


def linformer_definition(q, k, v, e, f, key_mask=None, query_mask=None):
    if key_mask is not None:
        k, v = (t * key_mask[:, :, None, None] for t in (k, v))
    k, v = (
        torch.einsum("jp,bjhd->bphd", w[: k.shape[1]].double(), t.double())
        for w, t in ((e, k), (f, v))
    )
    return definition(q, k, v, query_mask=query_mask)


@pytest.mark.parametrize("kv_len", [1, 5, 12])
def test_behaviour_19_linformer_uses_the_first_rows_of_its_projections(kv_len):
    q, k, v = inputs(q_len=7, kv_len=kv_len, heads=4, kv_heads=2, value_dim=3)
    e, f = (torch.randn(12, 4, dtype=torch.float64) for _ in range(2))
    masks = {"key_mask": torch.rand(2, kv_len) > 0.3, "query_mask": torch.rand(2, 7) > 0.3}
    for options in ({}, masks):
        out = cosformer.linformer_attention(q, k, v, e, f, **options)
        expected = linformer_definition(q, k, v, e, f, **options)
        torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)
    # Rows of the projections that the call does not reach have no effect.
    e[kv_len:], f[kv_len:] = float("nan"), float("nan")
    assert torch.equal(cosformer.linformer_attention(q, k, v, e, f, **masks), out)


def test_behaviour_19_longer_inputs_and_causal_calls_are_errors():
    q, k, v = inputs(q_len=7)
    e = torch.randn(6, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="key has length 7, key_len_proj has max_len 6"):
        cosformer.linformer_attention(q, k, v, e, e)
    with pytest.raises(RuntimeError, match="no causal form, as each projected key mixes all"):
        cosformer.linformer_attention(q, k[:, :5], v[:, :5], e, e, is_causal=True)
    for message, args in {
        r"key_len_proj is Double \[6\], expected floating \[max_len, projected_len\]": (e[:, 0], e),
        "key_len_proj has projected_len 3, value_len_proj has 2": (e, e[:, :2]),
        "projected_len 0, expected at least 1": (e[:, :0], e[:, :0]),
        "value_len_proj has max_len 4": (e, e[:4]),
    }.items():
        with pytest.raises(RuntimeError, match=f"linformer_attention: .*{message}"):
            cosformer.linformer_attention(q, k[:, :5], v[:, :5], *args)


def test_linformer_masked_keys_leak_nothing_and_no_keys_give_zero():
    q, k, v = inputs(q_len=7)
    e, f = (torch.randn(12, 4, dtype=torch.float64) for _ in range(2))
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, 3:], mask[1] = False, False
    call = lambda *t: cosformer.linformer_attention(*t, key_mask=mask)  # noqa: E731
    out, found = gradients(call, (q, k, v, e, f))
    assert (out[1] == 0).all() and (out[0] != 0).all()
    assert all((t[1] == 0).all() for t in found[:3])
    for t in (k, v):
        t[~mask] = float("nan")
    again, poisoned = gradients(call, (q, k, v, e, f))
    assert torch.equal(out, again)
    assert all(torch.equal(a, b) for a, b in zip(found, poisoned, strict=True))


# Longformer.


def longformer_definition(q, k, v, qg, kg, vg, *, window, dilation=1, global_mask, **options):
    local = definition(
        q, k, v, window=window, dilation=dilation, global_mask=global_mask, **options
    )
    of_globals = definition(qg, kg, vg, **options)
    rows = global_mask[:, : q.shape[1], None, None]
    return torch.where(rows, of_globals, local)


@pytest.mark.parametrize("globals_", [(), (0,), (0, 1, 17)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dilation", [1, 3])
def test_longformer_is_its_definition(globals_, is_causal, dilation):
    tensors = [t for _ in range(2) for t in inputs(q_len=40, heads=4, kv_heads=2, value_dim=3)]
    mask = tokens(2, 40, *globals_)
    mask[1, 17] = False  # rows of a batch with different numbers of them
    options = {
        "window": (4, 2),
        "dilation": dilation,
        "global_mask": mask,
        "is_causal": is_causal,
        "key_mask": torch.rand(2, 40) > 0.2,
        "query_mask": torch.rand(2, 40) > 0.2,
    }
    grad = torch.randn(2, 40, 4, 3, dtype=torch.float64)
    out, found = gradients(lambda *t: cosformer.longformer_attention(*t, **options), tensors, grad)
    expected_out, expected = gradients(
        lambda *t: longformer_definition(*t, **options), tensors, grad
    )
    assert relative(out, expected_out) < 1e-12
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)


def test_longformer_with_a_bias_and_starts():
    tensors = [t for _ in range(2) for t in inputs(q_len=5, kv_len=12)]
    bias = torch.randn(2, 7, dtype=torch.float64)
    options = {"window": (2, 0), "relative_bias": bias, "is_causal": True, "q_start": 7}
    mask = tokens(2, 12, 0, 9)
    out = cosformer.longformer_attention(*tensors, global_mask=mask, **options)
    local = definition(*tensors[:3], global_mask=mask, **options)
    options.pop("window")
    of_globals = definition(*tensors[3:], **options)
    expected = torch.where(mask[:, 7:, None, None], of_globals, local)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("is_causal", [False, True])
def test_longformer_what_is_not_used_leaks_nothing(is_causal):
    """The local query of a global token, and the global one of another, are never read."""
    tensors = [t for _ in range(2) for t in inputs(q_len=30)]
    mask = tokens(2, 30, 0, 11)
    call = lambda *t: cosformer.longformer_attention(  # noqa: E731
        *t, window=(2, 2), global_mask=mask, is_causal=is_causal
    )
    grad = torch.randn_like(tensors[0])
    out, found = gradients(call, tensors, grad)
    tensors[0][mask] = float("nan")
    tensors[3][~mask] = float("nan")
    again, poisoned = gradients(call, tensors, grad)
    assert torch.equal(out, again)
    assert all(torch.equal(a, b) for a, b in zip(found, poisoned, strict=True))


def test_longformer_errors():
    tensors = inputs() + inputs()
    options = {"window": (1, 1), "global_mask": tokens(2, 7, 0)}
    for message, changed, own in (
        ("global_mask is missing", tensors, {"global_mask": None}),
        ("window is missing", tensors, {"window": None}),
        (
            r"q_global is Double \[2, 7, 2, 3\], expected Double \[2, 7, 2, 4\] as q",
            (*tensors[:3], tensors[3][..., :3], *tensors[4:]),
            {},
        ),
        (
            r"global_mask has shape \[2, 6\], expected \[batch, kv_len\] = \[2, 7\]",
            tensors,
            {"global_mask": tokens(2, 6, 0)},
        ),
        ("block_mask is given", tensors, {"block_mask": torch.ones(1, 2, 2), "block_size": 4}),
    ):
        with pytest.raises(RuntimeError, match=f"longformer_attention: {message}"):
            cosformer.longformer_attention(*changed, **{**options, **own})


# BigBird.


def check_rows(mask, random, window, first, last, is_causal):
    heads, blocks, _ = mask.shape
    reach = window // 2
    for h in range(heads):
        for a in range(blocks):
            end = a + 1 if is_causal else blocks
            trailing = 0 if is_causal else last
            sees_all = a < first or a >= blocks - trailing
            fixed = {
                b
                for b in range(end)
                if sees_all or b < first or b >= blocks - trailing or abs(a - b) <= reach
            }
            seen = set(mask[h, a].nonzero().flatten().tolist())
            assert fixed <= seen <= set(range(end))
            # Exactly as many others as asked for, never one that was seen anyway.
            assert len(seen - fixed) == min(random, end - len(fixed))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("random", [0, 3, 100])
@pytest.mark.parametrize("window", [1, 3, 5])
@pytest.mark.parametrize("ends", [(0, 0), (1, 1), (2, 0)])
def test_bigbird_block_mask(is_causal, random, window, ends):
    for blocks in (0, 1, 2, 9):
        mask = cosformer.bigbird_block_mask(
            2,
            blocks,
            num_random_blocks=random,
            window_blocks=window,
            global_blocks=ends,
            is_causal=is_causal,
            seed=4,
        )
        assert mask.dtype == torch.bool and mask.shape == (2, blocks, blocks)
        check_rows(mask, random, window, *ends, is_causal)


def test_behaviour_21_bigbird_at_4096_tokens():
    """Random blocks reach beyond the first 1,024; seeded, and open to inspection."""
    options = {"num_random_blocks": 3, "seed": 8}
    mask = cosformer.bigbird_block_mask(4, 64, **options)
    check_rows(mask, 3, 3, 1, 1, False)
    near = (torch.arange(64)[:, None] - torch.arange(64)).abs() <= 1
    drawn = mask & ~near
    drawn[:, [0, -1], :] = drawn[:, :, [0, -1]] = False
    columns = drawn.sum((0, 1))
    assert (columns[1:-1] > 0).sum() > 55  # of 62
    beyond = drawn[:, :, 16:].sum() / drawn.sum()
    assert 0.65 < beyond < 0.9  # 47 of 62 blocks lie there
    assert torch.equal(mask, cosformer.bigbird_block_mask(4, 64, **options))
    assert (mask != cosformer.bigbird_block_mask(4, 64, num_random_blocks=3, seed=9)).any()
    assert (mask[0] != mask[1]).any()
    # The attention is that of the mask, at a length that is no multiple.
    q, k, v = inputs(batch=1, q_len=4090, heads=4, dim=4, dtype=torch.float32)
    out = cosformer.bigbird_attention(q, k, v, **options)
    by_mask = cosformer.softmax_attention(q, k, v, block_mask=mask, block_size=64)
    assert torch.equal(out, by_mask)
    row = 20 * 64 + 5
    seen = mask[:, 20].repeat_interleave(64, dim=1)[:, :4090]
    scores = torch.einsum("hd,jhd->hj", q[0, row], k[0]) / 2
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    assert relative(out[0, row], torch.einsum("hj,jhd->hd", weights, v[0])) < 3e-6


def test_behaviour_21_causal_rows_do_not_change_as_the_sequence_grows():
    options = {"num_random_blocks": 3, "seed": 8, "is_causal": True}
    long = cosformer.bigbird_block_mask(2, 64, **options)
    for blocks in (1, 7, 63):
        short = cosformer.bigbird_block_mask(2, blocks, **options)
        assert torch.equal(short, long[:, :blocks, :blocks])
    q, k, v = inputs(batch=1, q_len=300, heads=2, dim=8, dtype=torch.float32)
    own = options | {"block_size": 16}
    out = cosformer.bigbird_attention(q, k, v, **own)
    for length in (1, 17, 160, 299):
        again = cosformer.bigbird_attention(*(t[:, :length] for t in (q, k, v)), **own)
        assert relative(again, out[:, :length]) < 1e-6
    split = cosformer.bigbird_attention(q[:, 200:], k, v, q_start=200, **own)
    assert relative(split, out[:, 200:]) < 1e-6


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [1, 8, 9, 61])
def test_bigbird_is_its_definition(is_causal, length):
    tensors = inputs(q_len=length, heads=4, kv_heads=2)
    own = {"num_random_blocks": 1, "global_blocks": (1, 0), "seed": 3, "is_causal": is_causal}
    key_mask = torch.rand(2, length) > 0.2
    out = cosformer.bigbird_attention(*tensors, block_size=8, key_mask=key_mask, **own)
    mask = cosformer.bigbird_block_mask(4, -(-length // 8), **own)
    expected = definition(
        *tensors, block_mask=mask, block_size=8, key_mask=key_mask, is_causal=is_causal
    )
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)


def test_bigbird_errors():
    tensors = inputs()
    for message, options in {
        "block_size is 0, expected at least 1": {"block_size": 0},
        "window_blocks is 2, expected an odd number": {"window_blocks": 2},
        "num_random_blocks is -1, expected 0 or more": {"num_random_blocks": -1},
        r"global_blocks is \(1, -1\)": {"global_blocks": (1, -1)},
        "window is given": {"window": (1, 1)},
        "global_mask is given": {"global_mask": tokens(2, 7, 0)},
    }.items():
        with pytest.raises(RuntimeError, match=f"bigbird_attention: {message}"):
            cosformer.bigbird_attention(*tensors, **options)
    for message, args in {
        "num_heads is 0, expected at least 1": (0, 4),
        "num_blocks is -1, expected 0 or more": (1, -1),
    }.items():
        with pytest.raises(RuntimeError, match=f"bigbird_block_mask: {message}"):
            cosformer.bigbird_block_mask(*args, num_random_blocks=1)
    with pytest.raises(ValueError, match=r"global_blocks is 1, expected \(first, last\)"):
        cosformer.bigbird_block_mask(1, 4, num_random_blocks=1, global_blocks=1)


# T5.


def test_t5_relative_bias_errors():
    weight = torch.randn(8, 2)
    for message, call in {
        r"weight is Float \[8\], expected floating \[buckets, heads\]": (weight[:, 0], True, 128),
        "weight has 7 buckets, expected an even number from 4": (weight[:7], True, 128),
        "weight has 1 buckets, expected at least 2": (weight[:1], False, 128),
        "max_distance is 4, expected more than 4": (weight, False, 4),
    }.items():
        w, bidirectional, max_distance = call
        with pytest.raises(RuntimeError, match=f"t5_relative_bias: {message}"):
            cosformer.t5_relative_bias(w, bidirectional=bidirectional, max_distance=max_distance)


# The attention matrix.


def matrix_calls():
    longformer = {"window": (2, 1), "global_mask": tokens(2, 12, 0, 7)}
    return {
        **{
            f"softmax_{name}": ("softmax", options)
            for name, options in patterns(12, heads=4).items()
        },
        "longformer": ("longformer", longformer),
        "longformer_causal": ("longformer", longformer | {"is_causal": True}),
        "bigbird": ("bigbird", {"block_size": 2, "num_random_blocks": 1}),
        "bigbird_causal": ("bigbird", {"block_size": 2, "is_causal": True}),
        "linformer": ("linformer", {}),
    }


@pytest.mark.parametrize("name", matrix_calls())
def test_behaviour_44_the_attention_matrix(name):
    kind, options = matrix_calls()[name]
    q, k, v = inputs(q_len=12, heads=4, kv_heads=2)
    options = options | {"key_mask": torch.rand(2, 12) > 0.2}
    of_call = {}
    if kind == "longformer":
        qg, kg, vg = inputs(q_len=12, heads=4, kv_heads=2)
        # Times the values: one matrix has one set of them.
        options |= {"q_global": qg, "k_global": kg}
        of_call["v_global"] = v
    if kind == "linformer":
        options |= {
            name: torch.randn(20, 5).double() for name in ("key_len_proj", "value_len_proj")
        }
    matrix = cosformer.attention_matrix(kind, q, k, **options)
    assert matrix.shape == (2, 4, 12, 12)
    out = getattr(cosformer, f"{kind}_attention")(q, k, v, **options, **of_call)
    wide = v.repeat_interleave(2, dim=2)
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", matrix, wide), out)
    if kind != "linformer":
        sums = matrix.sum(-1)
        assert ((sums - 1).abs() < 1e-9).logical_or(sums == 0).all() and (sums > 0).any()
    assert (matrix.permute(0, 3, 1, 2)[~options["key_mask"]] == 0).all()


def test_the_attention_matrix_shows_what_is_visible():
    q, k, _ = inputs(q_len=20)
    for name, options in patterns(20).items():
        matrix = cosformer.attention_matrix("softmax", q, k, **options)
        assert torch.equal(matrix > 0, visible(2, 2, 20, 20, **options)), name


def test_attention_matrix_errors():
    q, k, _ = inputs()
    for message, kind, options in (
        ("unknown kind 'flash': expected one of 'linear'", "flash", {}),
        ("dropout_p is given", "softmax", {"dropout_p": 0.1, "dropout_seed": 1}),
        ("return_state is given", "linear", {"return_state": True}),
        ("kind 'cosformer' has no reweight_len", "cosformer", {}),
    ):
        with pytest.raises(ValueError, match=f"attention_matrix: {message}"):
            cosformer.attention_matrix(kind, q, k, **options)
    long = torch.zeros(1, 8200, 1, 1)
    with pytest.raises(ValueError, match=r"\[1, 1, 8200, 8200\] has more than 67108864 weights"):
        cosformer.attention_matrix("softmax", long, long)
