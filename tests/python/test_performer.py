"""Performer: goldens, the definition, gradients of both orders, states, errors, the projection."""

import math
import subprocess
import sys

import cosformer
import pytest
import torch
from cosformer import LinearState
from helpers import GOLDEN, PYTHON, golden, gradients, inputs, relative
from torch._dynamo.testing import CompileCounter
from torch.autograd import gradcheck, gradgradcheck

OPS = torch.ops.cosformer
FILES = sorted(
    p.stem for p in GOLDEN.glob("*.safetensors") if p.stem.startswith(("performer", "naive_perf"))
)


def definition(q, k, v, projection, *, is_causal=False, key_mask=None):
    """Every weight from logarithms, in double."""
    group = q.shape[2] // k.shape[2]
    q, k, v, w = (t.double() for t in (q, k, v, projection))
    k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))

    def logs(x):
        x = x / x.shape[-1] ** 0.25
        return torch.einsum("bshd,fd->bhsf", x, w) - x.square().sum(-1).mT[..., None] / 2

    scores = torch.logsumexp(logs(q)[:, :, :, None] + logs(k)[:, :, None], -1)
    visible = torch.ones(q.shape[0], q.shape[1], k.shape[1], dtype=torch.bool)
    if is_causal:
        visible = visible.tril()
    if key_mask is not None:
        visible = visible & key_mask[:, None]
    weights = scores.masked_fill(~visible[:, None], -math.inf).softmax(-1).nan_to_num(0)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def projection_of(features, dim, dtype=torch.float64, seed=3):
    return cosformer.performer_projection(features, dim, seed=seed).to(dtype)


def test_there_are_golden_files():
    assert len(FILES) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", FILES)
def test_golden(name, dtype):
    tensors, metadata = golden(name)
    q, k, v, w, grad = (tensors[t].to(dtype) for t in ("q", "k", "v", "projection", "grad_out"))
    causal = metadata.get("kwargs", metadata)["is_causal"]
    out, found = gradients(
        lambda q, k, v: cosformer.performer_attention(q, k, v, w, is_causal=causal), (q, k, v), grad
    )
    limit, grad_limit = (5e-6, 2e-5) if dtype == torch.float32 else (5e-7, 2e-6)
    if name == "naive_performer_scale1" and dtype == torch.float32:
        limit = grad_limit = 1e-4
    assert relative(out, tensors["out"]) <= limit
    for gradient, key in zip(found, ("dq", "dk", "dv"), strict=True):
        assert relative(gradient, tensors[key]) <= grad_limit, key


# A scale at which float32 logarithms would be off by more than a weight, in each form (design 2).
@pytest.mark.parametrize("scale", [1, 3, 10])
@pytest.mark.parametrize("is_causal", [False, True])
def test_any_scale(scale, is_causal):
    q, k, v = inputs(q_len=150, heads=4, kv_heads=2, dim=32, dtype=torch.float32)
    q, k = q * scale, k * scale
    w = projection_of(64, 32, torch.float32)
    want = definition(q, k, v, w, is_causal=is_causal)
    out = cosformer.performer_attention(q, k, v, w, is_causal=is_causal)
    assert relative(out, want) <= 5e-6


# Behaviour 3.
def test_behaviour_3_scale_1e4():
    q, k, v = inputs(q_len=99, dtype=torch.float32)
    q, k = q * 1e4, k * 1e4
    w = projection_of(16, 4, torch.float32)
    leaves = [t.requires_grad_() for t in (q, k, v, w)]
    out = cosformer.performer_attention(*leaves, is_causal=True)
    assert relative(out, definition(*leaves, is_causal=True)) <= 1e-5
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in leaves)


# Behaviour 6.
def test_behaviour_6_decoding_while_keys_grow_30_fold():
    q, k, v = inputs(batch=2, q_len=1000, dim=16, dtype=torch.float32)
    k = k * 30 ** (torch.arange(1000) / 1000)[:, None, None]
    w = projection_of(48, 16, torch.float32)
    parallel, after = cosformer.performer_attention(q, k, v, w, is_causal=True, return_state=True)
    state = empty_state(2, 2, 48, 16)
    steps = [
        cosformer.performer_attention_decode_step_(
            q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1], w, state
        )
        for t in range(1000)
    ]
    steps = torch.cat(steps, 1)
    assert steps.isfinite().all()
    assert relative(steps, parallel) <= 1e-5
    assert relative(true_sums(state)[0], true_sums(after)[0]) <= 1e-5


def empty_state(rows, kv_heads, features, value_dim, dtype=torch.float32):
    return LinearState(
        torch.zeros(rows, kv_heads, features, value_dim, dtype=dtype),
        torch.zeros(rows, kv_heads, features, dtype=dtype),
        torch.zeros(rows, dtype=torch.int64),
        torch.zeros(rows, dtype=torch.int64),
        "performer",
        "performer",
        log_scale=torch.full((rows, kv_heads, features), -math.inf, dtype=dtype),
    )


def true_sums(state):
    """The feature sums over a common scale a head: what states of the same keys share."""
    top = state.log_scale.double().amax(-1, keepdim=True)
    factor = (state.log_scale.double() - top).exp()
    return state.kv_state.double() * factor[..., None], state.k_sum.double() * factor


# Behaviours 23 and 24, and 26 with its file.
def test_behaviours_23_24_splits_and_files(tmp_path):
    q, k, v = inputs(q_len=90, heads=4, kv_heads=2, dtype=torch.float32)
    w = projection_of(16, 4, torch.float32)
    whole, after = cosformer.performer_attention(q, k, v, w, is_causal=True, return_state=True)
    for cut in (0, 1, 31, 64, 89, 90):
        first, state = cosformer.performer_attention(
            q[:, :cut], k[:, :cut], v[:, :cut], w, is_causal=True, return_state=True
        )
        state.save(tmp_path / "state")
        state = LinearState.load(tmp_path / "state")
        second, state = cosformer.performer_attention(
            q[:, cut:], k[:, cut:], v[:, cut:], w, is_causal=True, return_state=True, state=state
        )
        assert relative(torch.cat((first, second), 1), whole) <= 1e-5, cut
        for found, wanted in zip(true_sums(state), true_sums(after), strict=True):
            assert relative(found, wanted) <= 1e-5
        assert state[4:9] == after[4:9] == ("performer", "performer", 0, 0.0, False)
        assert torch.equal(state.position, after.position)
    # Rows, dtypes, copies.
    rows = after.select([1, 1, 0])
    assert torch.equal(rows.log_scale, after.log_scale[[1, 1, 0]])
    wide = after.to(torch.float64)
    assert wide.log_scale.dtype == torch.float64
    narrow = wide._replace(log_scale=wide.log_scale + 1e-5).to(torch.float32)
    for found, wanted in zip(true_sums(narrow), true_sums(wide), strict=True):
        assert relative(found, wanted) <= 1e-6
    assert after.clone().log_scale is not after.log_scale


# Behaviour 26.
def test_behaviour_26_a_new_process_goes_on_from_a_saved_state(tmp_path):
    q, k, v = inputs(q_len=20, dtype=torch.float32)
    w = projection_of(16, 4, torch.float32)
    _, state = cosformer.performer_attention(q, k, v, w, is_causal=True, return_state=True)
    state.save(tmp_path / "state")
    torch.save((q[:, :1], k[:, :1], v[:, :1], w), tmp_path / "token")
    code = (
        f"import sys; sys.path.insert(0, {str(PYTHON)!r})\n"
        "import cosformer, torch\n"
        f"state = cosformer.LinearState.load({str(tmp_path / 'state')!r})\n"
        f"*token, w = torch.load({str(tmp_path / 'token')!r})\n"
        "out = cosformer.performer_attention_decode_step_(*token, w, state)\n"
        f"torch.save((out, state.kv_state, state.log_scale), {str(tmp_path / 'out')!r})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    out, kv_state, log_scale = torch.load(tmp_path / "out")
    want = cosformer.performer_attention_decode_step_(q[:, :1], k[:, :1], v[:, :1], w, state)
    assert torch.equal(out, want)
    assert torch.equal(kv_state, state.kv_state)
    assert torch.equal(log_scale, state.log_scale)


def mask(*size):
    return torch.rand(*size, generator=torch.Generator().manual_seed(3)) > 0.3


CASES = {
    "noncausal": ({}, {}),
    "causal": ({"heads": 4, "kv_heads": 2, "value_dim": 3}, {"is_causal": True}),
    "cross": ({"q_len": 4, "kv_len": 6}, {}),
    "causal_cross": (
        {"q_len": 4, "kv_len": 6},
        {"is_causal": True, "q_start": torch.tensor([3, 0]), "kv_start": 1},
    ),
    "masks": ({}, {"key_mask": mask(2, 7), "query_mask": mask(2, 7), "is_causal": True}),
    "masks_noncausal": ({}, {"key_mask": mask(2, 7), "query_mask": mask(2, 7)}),
    "packed": (
        {"batch": 1, "q_len": 6, "kv_len": 8},
        {
            "cu_seqlens_q": torch.tensor([0, 4, 4, 6]),
            "cu_seqlens_k": torch.tensor([0, 3, 5, 8]),
            "is_causal": True,
        },
    ),
}


# Behaviour 28.
@pytest.mark.parametrize("name", CASES)
def test_gradcheck_and_gradgradcheck(name):
    sizes, options = CASES[name]
    tensors = [t.requires_grad_() for t in inputs(**sizes)]
    w = projection_of(5, 4).requires_grad_()

    def call(q, k, v, w):
        return cosformer.performer_attention(q, k, v, w, **options)

    assert gradcheck(call, (*tensors, w))
    assert gradgradcheck(call, (*tensors, w))


# The maxima are constants: what is checked is the sums that they scale.
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradcheck_through_the_state(is_causal):
    first, second = inputs(batch=1, q_len=3), inputs(batch=1, q_len=4)
    w = projection_of(5, 4)
    leaves = [t.requires_grad_() for t in (*first, *second, w)]

    def call(q1, k1, v1, q2, k2, v2, w):
        _, state = cosformer.performer_attention(q1, k1, v1, w, is_causal=True, return_state=True)
        out, state = cosformer.performer_attention(
            q2, k2, v2, w, is_causal=is_causal, state=state, return_state=True
        )
        scale = state.log_scale.exp()
        return out, state.kv_state * scale[..., None], state.k_sum * scale

    assert gradcheck(call, leaves)
    assert gradgradcheck(call, leaves)


# The portable path by itself, which serves devices without kernels.
@pytest.mark.parametrize("scale", [1, 10, 300])
@pytest.mark.parametrize("name", CASES)
def test_portable_agrees(name, scale):
    sizes, options = CASES[name]
    q, k, v = inputs(**sizes)
    q, k = q * scale, k * scale
    w = projection_of(6, 4)
    starts = [
        torch.tensor(options[key]) if isinstance(options.get(key), int) else options.get(key)
        for key in ("q_start", "kv_start")
    ]
    keys = ("key_mask", "query_mask", "cu_seqlens_q", "cu_seqlens_k")
    rest = [options.get(key) for key in keys]
    arguments = (*starts, *rest, *[None] * 5, options.get("is_causal", False))
    args = (q, k, v, w, *arguments, "performer", "performer", True, True)
    found = OPS.performer_attention_portable(*args)
    wanted = OPS.performer_attention(*args)
    limit = 1e-11 + 1e-12 * scale**2  # what doubles keep of such logarithms
    assert relative(found[0], wanted[0]) <= limit
    seen = wanted[1].isfinite()
    assert torch.equal(found[1].isfinite(), seen)
    assert relative(found[1][seen], wanted[1][seen]) <= 1e-12
    for i in (2, 3):
        assert relative(found[i], wanted[i]) <= limit
    assert all(torch.equal(found[i], wanted[i]) for i in (5, 6))


# Behaviour 8: what is invisible changes no bit, forward or backward; in the portable path too.
@pytest.mark.parametrize("op", [OPS.performer_attention, OPS.performer_attention_portable])
@pytest.mark.parametrize("is_causal", [False, True])
def test_behaviour_8_what_is_masked_changes_no_bit(op, is_causal):
    tensors = inputs()
    key_mask, query_mask = mask(2, 7), mask(2, 7)
    w = projection_of(6, 4)
    results = []
    for junk in (0.0, math.nan, math.inf):
        q, k, v = (t.clone() for t in tensors)
        q[~query_mask] = junk
        k[~key_mask] = junk
        v[~key_mask] = junk
        leaves = [t.requires_grad_() for t in (q, k, v, w.clone())]
        args = (*leaves, None, None, key_mask, query_mask, *[None] * 7, is_causal)
        out = op(*args, "performer", "performer", False, False)[0]
        grad = torch.ones_like(out)
        grad[~query_mask] = junk
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    for result in results[1:]:
        for found, wanted in zip(result, results[0], strict=True):
            assert torch.equal(found, wanted)
    assert all(t.isfinite().all() for t in results[0])


# Behaviour 7.
def test_behaviour_7_a_row_without_keys_is_zero():
    leaves = [t.requires_grad_() for t in (*inputs(), projection_of(6, 4))]
    key_mask = torch.tensor([[False], [True]]).expand(2, 7)
    out = cosformer.performer_attention(*leaves, key_mask=key_mask, is_causal=True)
    assert not out[0].any()
    (found,) = torch.autograd.grad(out.sum(), leaves[:1])
    assert not found[0].any()


# Behaviour 29.
def test_behaviour_29_noncontiguous_inputs_and_gradients():
    q, k, v = inputs(dtype=torch.float32)
    w = projection_of(6, 4, torch.float32)
    grad = torch.randn_like(q)
    call = lambda q, k, v, w: cosformer.performer_attention(q, k, v, w, is_causal=True)  # noqa: E731
    out, found = gradients(call, (q, k, v, w), grad)
    odd = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    strided = torch.stack((grad, grad), -1)[..., 0]
    out_2, found_2 = gradients(call, (*odd, w.mT.contiguous().mT), strided)
    assert torch.equal(out, out_2)
    assert all(torch.equal(a, b) for a, b in zip(found, found_2, strict=True))


# Behaviour 30: the projection is from its seed alone, on every machine.
def test_behaviour_30_projections_are_seeded():
    w = cosformer.performer_projection(10, 4, seed=5)
    assert torch.equal(w, cosformer.performer_projection(10, 4, seed=5))
    assert not torch.equal(w, cosformer.performer_projection(10, 4, seed=6))
    gram = (w[:4] @ w[:4].mT).fill_diagonal_(0)
    assert gram.abs().max() < 1e-5
    assert not torch.equal(w, cosformer.performer_projection(10, 4, orthogonal=False, seed=5))
    known = torch.tensor(KNOWN)
    assert torch.allclose(cosformer.performer_projection(2, 2, seed=0), known, atol=1e-6)
    q, k, v = inputs(dtype=torch.float32)
    first = cosformer.performer_attention(q, k, v, w)
    assert torch.equal(first, cosformer.performer_attention(q, k, v, w))


# What seed 0 gives: a change would part saved models from their projections.
KNOWN = [[-0.08824110, -0.98033541], [2.35764313, -0.21221414]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_and_autocast(dtype):
    q, k, v = inputs(q_len=70, dim=16, dtype=torch.float32)
    w = projection_of(32, 16, torch.float32)
    want = definition(q, k, v, w, is_causal=True)
    limit = 2e-2 if dtype == torch.bfloat16 else 3e-3
    out = cosformer.performer_attention(
        *(t.to(dtype) for t in (q, k, v)), w.to(dtype).float(), is_causal=True
    )
    assert out.dtype == dtype
    assert relative(out, want) <= limit
    with torch.autocast("cpu", dtype):
        out, state = cosformer.performer_attention(q, k, v, w, is_causal=True, return_state=True)
    assert out.dtype == dtype
    assert state.kv_state.dtype == state.log_scale.dtype == torch.float32
    assert relative(out, want) <= limit


def arguments(q, k, v, w, is_causal=True, state=None):
    tensors = [None] * 5
    if state is not None:
        tensors = [state.kv_state, state.k_sum, state.log_scale, state.start, state.position]
    return (q, k, v, w, *[None] * 6, *tensors, is_causal)


# Behaviour 31.
@pytest.mark.parametrize("with_state", [False, True])
def test_opcheck(with_state):
    q, k, v = inputs(q_len=5, heads=4, kv_heads=2, value_dim=3, dtype=torch.float32)
    w = projection_of(6, 4, torch.float32)
    state = None
    if with_state:
        state = cosformer.performer_attention(q, k, v, w, return_state=True, is_causal=True)[1]
    leaves = [t.requires_grad_() for t in (q, k, v, w)]
    shared = arguments(*leaves, state=state)
    flags = ("performer", "performer", with_state, True)
    torch.library.opcheck(OPS.performer_attention.default, (*shared, *flags))
    shared = arguments(q.detach(), k.detach(), v.detach(), w.detach(), state=state)
    out, log_denominator, *made = OPS.performer_attention(*shared, *flags)
    d_state = [torch.randn_like(t) for t in made[:2]] if with_state else [None, None]
    needs = [True] * 4 + [with_state] * 2
    args = (torch.randn_like(out), *d_state, out, log_denominator, needs)
    torch.library.opcheck(OPS.performer_attention_backward.default, (*args, *shared))


def test_opcheck_decode_step_and_projection():
    q, k, v = inputs(batch=3, q_len=1, heads=4, kv_heads=2, dtype=torch.float32)
    w = projection_of(6, 4, torch.float32)
    state = cosformer.performer_attention(q, k, v, w, return_state=True, is_causal=True)[1]
    token_mask = torch.tensor([[True], [False], [True]])
    args = (
        *(q, k, v, w, state.kv_state, state.k_sum, state.log_scale, state.position, state.start),
        *(token_mask, "performer", "performer"),
    )
    torch.library.opcheck(OPS.performer_attention_decode_step_.default, args)
    torch.library.opcheck(OPS.performer_projection.default, (6, 4, True, 3))


def test_behaviour_31_compiles_whole():
    q, k, v = inputs(q_len=9, dtype=torch.float32)
    w = projection_of(6, 4, torch.float32)
    leaves = [t.requires_grad_() for t in (q, k, v, w)]

    def call(q, k, v, w):
        out, state = cosformer.performer_attention(q, k, v, w, is_causal=True, return_state=True)
        return out.sum() + state.kv_state.sum()

    counter = CompileCounter()
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    eager = torch.autograd.grad(call(*leaves), leaves)
    found = torch.autograd.grad(compiled(*leaves), leaves)
    assert counter.frame_count == 1
    assert all(torch.equal(a, b) for a, b in zip(found, eager, strict=True))
    traced = torch.compile(call, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(traced(*leaves), leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, eager, strict=True))


def test_attention_matrix():
    q, k, v = inputs(heads=4, kv_heads=2)
    w = projection_of(6, 4)
    weights = cosformer.attention_matrix("performer", q, k, projection=w, is_causal=True)
    out = cosformer.performer_attention(q, k, v, w, is_causal=True)
    assert (weights >= 0).all()
    assert torch.allclose(weights.sum(-1), torch.ones_like(weights.sum(-1)))
    product = torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(2, 2))
    assert relative(product, out) <= 1e-12


ERRORS = {
    "projection has shape": lambda q, k, v, w: cosformer.performer_attention(q, k, v, w[:, :3]),
    "performer_attention: key has length": lambda q, k, v, w: cosformer.performer_attention(
        q, k[:, :3], v, w
    ),
    "state was made with kind 'linear', feature_map 'relu'; the call has kind 'performer'": (
        lambda q, k, v, w: cosformer.performer_attention(
            q, k, v, w, state=cosformer.linear_attention(q, k, v, return_state=True)[1]
        )
    ),
    "state was made with kind 'performer'": lambda q, k, v, w: cosformer.linear_attention(
        q, k, v, state=cosformer.performer_attention(q, k, v, w, return_state=True)[1]
    ),
    r"state.kv_state has shape \[2, 2, 6, 4\], expected": (
        lambda q, k, v, w: cosformer.performer_attention(
            q, k, v, w[:5], state=cosformer.performer_attention(q, k, v, w, return_state=True)[1]
        )
    ),
    "num_features is 0": lambda q, k, v, w: cosformer.performer_projection(0, 4, seed=1),
    "expected 1: one token a row": lambda q, k, v, w: cosformer.performer_attention_decode_step_(
        q, k, v, w, cosformer.performer_attention(q, k, v, w, return_state=True)[1]
    ),
    "keys must go on where the state ends": lambda q, k, v, w: cosformer.performer_attention(
        *(q, k, v, w),
        kv_start=3,
        state=cosformer.performer_attention(q, k, v, w, return_state=True)[1],
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_say_what_was_found_and_expected(message):
    q, k, v = inputs(dtype=torch.float32)
    with pytest.raises(RuntimeError, match=message):
        ERRORS[message](q, k, v, projection_of(6, 4, torch.float32))


def test_errors_of_a_step_and_of_a_mask():
    q, k, v = inputs(q_len=1, dtype=torch.float32)
    w = projection_of(6, 4, torch.float32)
    state = cosformer.linear_attention(q, k, v, return_state=True)[1]
    with pytest.raises(ValueError, match="is of kind 'linear' and has no log_scale"):
        cosformer.performer_attention_decode_step_(q, k, v, w, state)
    with pytest.raises(ValueError, match="key_mask=~key_padding_mask"):
        cosformer.performer_attention(q, k, v, w, key_padding_mask=torch.ones(2, 1).bool())
    state = cosformer.performer_attention(q, k, v, w, return_state=True)[1]
    with pytest.raises(RuntimeError, match="has no gradient: call it under torch.no_grad"):
        cosformer.performer_attention_decode_step_(q.requires_grad_(), k, v, w, state)


# Issue 4, 3: the error against softmax falls like 1 / sqrt(features), and orthogonal features lie
# below independent ones; benchmarks/performer_error.py prints the table.
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_error_against_softmax(is_causal, monkeypatch):
    monkeypatch.syspath_prepend(str(PYTHON.parent / "benchmarks"))
    import performer_error

    features = (16, 64, 256, 1024)
    options = {"seeds": 24, "length": 64, "is_causal": is_causal}
    orthogonal = performer_error.errors(features, True, **options)
    independent = performer_error.errors(features, False, **options)
    for found in (orthogonal, independent):
        assert -0.55 <= performer_error.slope(features, found) <= -0.45, found
    assert all(a < b for a, b in zip(orthogonal, independent, strict=True))
    assert orthogonal[-1] < 0.05
