"""torch's own operator check, compilation, autocast and threads for softmax attention and its kinds
(behaviour 31)."""

import cosformer
import pytest
import torch
from cosformer._softmax import _arguments
from helpers import inputs, relative
from softmax_helpers import PATTERNS, band, patterns, tokens
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode

OPS = torch.ops.cosformer


def samples():
    """Varied calls: (options, tensors)."""
    tensors = inputs(dtype=torch.float32)
    grouped = inputs(q_len=5, heads=4, kv_heads=2, value_dim=3, dtype=torch.float32)
    calls = {name: (options, tensors) for name, options in patterns(7).items()}
    return calls | {
        "grouped_bias": ({"relative_bias": torch.randn(4, 5), "is_causal": True}, grouped),
        "starts": (
            {"is_causal": True, "q_start": torch.tensor(4), "kv_start": torch.tensor([1, 2])},
            tensors,
        ),
        "masks": (
            {"key_mask": torch.rand(2, 7) > 0.3, "query_mask": torch.rand(2, 7) > 0.3},
            tensors,
        ),
        "packed": (
            {"is_causal": True, "cu_seqlens_q": torch.tensor([0, 3, 3, 7], dtype=torch.int32)},
            inputs(batch=1, dtype=torch.float64),
        ),
        "dropout": ({"dropout_p": 0.3, "dropout_seed": 7}, tensors),
    }


NAMES = [*PATTERNS, "grouped_bias", "starts", "masks", "packed", "dropout"]


@pytest.mark.parametrize("name", NAMES)
def test_opcheck_softmax_attention(name):
    options, tensors = samples()[name]
    tensors = [t.requires_grad_() for t in tensors]
    if "relative_bias" in options:
        options["relative_bias"].requires_grad_()
    args = (*_arguments(*tensors, **options), name == "masks")
    torch.library.opcheck(OPS.softmax_attention.default, args)


@pytest.mark.parametrize("name", NAMES)
def test_opcheck_softmax_attention_backward(name):
    options, tensors = samples()[name]
    shared = _arguments(*tensors, **options)
    out, log_sum_exp = OPS.softmax_attention(*shared, True)
    needs = [True, name != "masks", True, name == "grouped_bias"]
    args = (torch.randn_like(out), out, log_sum_exp, needs, *shared)
    torch.library.opcheck(OPS.softmax_attention_backward.default, args)


def decode_arguments(is_ring=False):
    q, k, v = inputs(batch=3, q_len=1, heads=4, kv_heads=2, dtype=torch.float32)
    keys, values = torch.randn(3, 6, 2, 4), torch.randn(3, 6, 2, 4)
    position, start = torch.tensor([2, 5, 9]), torch.tensor([0, 1, 7])
    mask = torch.rand(3, 6) > 0.3
    bias = torch.randn(4, 5)
    return (
        *(q, k, v, keys, values, position, start, mask, None, None, None, bias),
        *(is_ring, None, 4, 0, 1, None),
    )


@pytest.mark.parametrize("is_ring", [False, True])
def test_opcheck_decode_step(is_ring):
    torch.library.opcheck(OPS.softmax_attention_decode_step_.default, decode_arguments(is_ring))


def test_opcheck_of_what_needs_no_kernel():
    q, k, v = [t.requires_grad_() for t in inputs(dtype=torch.float32)]
    projections = [torch.randn(9, 3, requires_grad=True) for _ in range(2)]
    torch.library.opcheck(OPS.linformer_attention.default, (*_arguments(q, k, v), *projections))
    mask = tokens(2, 7, 0, 3)
    longformer = _arguments(q, k, v, window=(1, 1), global_mask=mask, is_causal=True)
    torch.library.opcheck(OPS.longformer_attention.default, (*longformer, q, k, v))
    bigbird = _arguments(q, k, v, block_size=2)
    torch.library.opcheck(OPS.bigbird_attention.default, (*bigbird, 1, 3, 1, 1, 0))
    torch.library.opcheck(OPS.bigbird_block_mask.default, (2, 9, 1, 3, 1, 1, False, 5))
    weight = torch.randn(8, 2, requires_grad=True)
    torch.library.opcheck(OPS.t5_relative_bias.default, (weight, True, 16))


@pytest.mark.parametrize("name", NAMES)
def test_portable_path_equals_the_kernels(name):
    options, tensors = samples()[name]
    args = (*_arguments(*tensors, **options), True)
    limit = 1e-12 if tensors[0].dtype == torch.float64 else 2e-6
    found, expected = OPS.softmax_attention_portable(*args), OPS.softmax_attention(*args)
    blind = expected[1].isneginf()
    assert torch.equal(found[1].isneginf(), blind)
    for a, b in ((found[0], expected[0]), (found[1][~blind], expected[1][~blind])):
        assert a.dtype == b.dtype
        assert relative(a, b) <= limit


def test_log_sum_exp_is_shown_without_gradient():
    q, k, v = [t.requires_grad_() for t in inputs()]
    out, log_sum_exp = OPS.softmax_attention(*_arguments(q, k, v), True)
    assert out.requires_grad and not log_sum_exp.requires_grad
    scores = torch.einsum("bihd,bjhd->bihj", q, k) / 2
    torch.testing.assert_close(log_sum_exp, scores.logsumexp(-1).detach())
    assert OPS.softmax_attention(*_arguments(q, k, v), False)[1].numel() == 0


def test_fake_tensors_have_the_sizes_and_dtypes_of_real_ones():
    options, tensors = samples()["grouped_bias"]
    real = OPS.softmax_attention(*_arguments(*tensors, **options), True)
    with FakeTensorMode() as mode:
        q, k, v, bias = (mode.from_tensor(t) for t in (*tensors, options["relative_bias"]))
        fakes = OPS.softmax_attention(
            *_arguments(q, k, v, relative_bias=bias, is_causal=True), True
        )
        with pytest.raises(RuntimeError, match="head_dim 4, key has 3"):
            cosformer.softmax_attention(q, k[..., :3], v)
    for fake, expected in zip(fakes, real, strict=True):
        assert fake.shape == expected.shape and fake.dtype == expected.dtype


def compiled(function, backend="aot_eager", **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def kinds():
    """Calls of each kind on (q, k, v) alone."""
    mask = tokens(2, 9, 0, 4)
    projections = [torch.randn(12, 3) for _ in range(2)]
    weight = torch.randn(8, 2)
    blocks = band(5)

    def t5(q, k, v):
        bias = cosformer.t5_relative_bias(weight, bidirectional=True, max_distance=16)
        return cosformer.softmax_attention(q, k, v, relative_bias=bias)

    return {
        "softmax": lambda q, k, v: cosformer.softmax_attention(q, k, v, is_causal=True),
        "window": lambda q, k, v: cosformer.softmax_attention(q, k, v, window=(2, 1)),
        "blocks": lambda q, k, v: cosformer.softmax_attention(
            q, k, v, block_mask=blocks, block_size=2
        ),
        "dropout": lambda q, k, v: cosformer.softmax_attention(
            q, k, v, dropout_p=0.2, dropout_seed=3
        ),
        "t5": t5,
        "linformer": lambda q, k, v: cosformer.linformer_attention(q, k, v, *projections),
        "longformer": lambda q, k, v: cosformer.longformer_attention(
            q, k, v, q, k, v, window=(1, 1), global_mask=mask
        ),
        "bigbird": lambda q, k, v: cosformer.bigbird_attention(
            q, k, v, block_size=2, num_random_blocks=1
        ),
    }


def both(function, in_graph):
    tensors = inputs(q_len=9, dtype=torch.float32)
    results = []
    for call in (function, in_graph):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = call(*leaves)
        out.square().sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    return zip(*results, strict=True)


@pytest.mark.parametrize("kind", kinds())
def test_behaviour_31_fullgraph_compile_equals_eager(kind):
    function = kinds()[kind]
    for a, b in both(function, compiled(function)):
        # Longformer's global rows are masked there, gathered here; inductor's own products differ.
        assert relative(a, b) < 1e-6


def test_behaviour_31_inductor():
    function = kinds()["softmax"]
    for a, b in both(function, compiled(function, backend="inductor")):
        assert relative(a, b) < 1e-6


def test_behaviour_31_dynamic_lengths_and_seeds_compile_once():
    counter = CompileCounter()
    bias = torch.randn(2, 7)
    function = compiled(
        lambda q, k, v, seed: cosformer.softmax_attention(
            q, k, v, relative_bias=bias, is_causal=True, dropout_p=0.1, dropout_seed=seed
        ),
        dynamic=True,
        backend=counter,
    )
    for length in (3, 4, 9):
        tensors = inputs(q_len=length, dtype=torch.float32)
        seed = torch.tensor(length)
        expected = cosformer.softmax_attention(
            *tensors, relative_bias=bias, is_causal=True, dropout_p=0.1, dropout_seed=seed
        )
        assert torch.equal(function(*tensors, seed), expected)
    assert counter.frame_count == 1


def test_compiled_decode_in_place():
    args = decode_arguments(is_ring=True)
    eager, other = ([t.clone() for t in args[3:6]] for _ in range(2))

    def step(q, k, v, keys, values, position):
        return cosformer.softmax_attention_decode_step_(
            q, k, v, keys, values, position, is_ring=True, window=(4, 0)
        )

    counter = CompileCounter()
    in_graph = compiled(step, backend=counter)
    for _ in range(4):
        a, b = step(*args[:3], *eager), in_graph(*args[:3], *other)
        assert torch.equal(a, b)
        assert all(torch.equal(x, y) for x, y in zip(eager, other, strict=True))
    assert (eager[2] == args[5] + 4).all()
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    tensors = [t.requires_grad_() for t in inputs(q_len=9, dtype=torch.float32)]
    bias = torch.randn(2, 5, requires_grad=True)
    options = {"relative_bias": bias, "is_causal": True}
    with torch.autocast("cpu", dtype=dtype):
        out = cosformer.softmax_attention(*tensors, **options)
        shortened = cosformer.linformer_attention(*tensors, *(torch.randn(9, 3) for _ in range(2)))
    assert out.dtype == shortened.dtype == dtype
    by_hand = cosformer.softmax_attention(*(t.to(dtype) for t in tensors), **options)
    assert torch.equal(out, by_hand)
    out.sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in (*tensors, bias))
    # A cache keeps its dtype, and the token takes it.
    q, k, v = (t[:, :1].detach() for t in tensors)
    keys, values = (torch.zeros(2, 4, 2, 4, dtype=dtype) for _ in range(2))
    with torch.autocast("cpu", dtype=dtype):
        out = cosformer.softmax_attention_decode_step_(
            q, k, v, keys, values, torch.zeros(2, dtype=torch.int64)
        )
        assert out.dtype == dtype
        doubles = [t.detach().double() for t in tensors]
        assert cosformer.softmax_attention(*doubles).dtype == torch.float64


def test_autocast_does_not_reach_into_the_portable_path():
    tensors = [t.requires_grad_() for t in inputs(q_len=20, dim=8, dtype=torch.float32)]
    out = cosformer.softmax_attention(*tensors, is_causal=True)
    first = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
    loss = sum(g.square().sum() for g in first)
    expected = torch.autograd.grad(loss, tensors, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(loss, tensors)
    for a, b in zip(found, expected, strict=True):
        assert relative(a, b) < 1e-5


def test_thread_count_changes_no_bit(two_threads):
    tensors = inputs(batch=1, q_len=700, heads=1, dim=32, dtype=torch.float32)
    bias = torch.randn(1, 9)

    def run():
        leaves = [t.clone().requires_grad_() for t in (*tensors, bias)]
        out = cosformer.softmax_attention(*leaves[:3], relative_bias=leaves[3], is_causal=True)
        out.square().sum().backward()
        return [out, *(leaf.grad for leaf in leaves)]

    with_two = run()
    torch.set_num_threads(1)
    for a, b in zip(with_two, run(), strict=True):
        assert torch.equal(a, b)


def test_inference_mode():
    tensors = inputs(dtype=torch.float32)
    expected = cosformer.softmax_attention(*tensors, is_causal=True)
    with torch.inference_mode():
        out = cosformer.softmax_attention(*tensors, is_causal=True)
        keys, values = torch.zeros(2, 3, 2, 4), torch.zeros(2, 3, 2, 4)
        position = torch.zeros(2, dtype=torch.int64)
        cosformer.softmax_attention_decode_step_(
            *(t[:, :1] for t in tensors), keys, values, position
        )
    assert torch.equal(out, expected)
