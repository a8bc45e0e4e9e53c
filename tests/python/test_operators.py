"""torch's own operator check, fake tensors, compilation, autocast, threads (behaviour 31)."""

import cosformer
import pytest
import torch
from helpers import inputs, relative
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode

OPS = torch.ops.cosformer
CAUSAL = {"is_causal": True, "reweight_len": 20}


def arguments(
    q,
    k,
    v,
    *,
    q_start=None,
    kv_start=None,
    key_mask=None,
    query_mask=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    state=None,
    feature_map="relu",
    reweight_len=None,
    is_causal=False,
    normalizer="sum",
    rotary_base=None,
    rotary_interleaved=False,
):
    """What the forward and the backward operator share, in the schema's order."""
    tensors = (None,) * 4 if state is None else tuple(state[:4])
    return (
        *(q, k, v, q_start, kv_start, key_mask, query_mask, cu_seqlens_q, cu_seqlens_k),
        *tensors,
        *(feature_map, reweight_len, is_causal, normalizer, 1e-6, rotary_base, rotary_interleaved),
    )


def spec(options):
    return (
        "linear",
        options.get("feature_map", "relu"),
        options.get("reweight_len") or 0,
        options.get("rotary_base") or 0.0,
        options.get("rotary_interleaved", False),
    )


def state_for(q, k, v, **options):
    return cosformer.linear_attention(q, k, v, return_state=True, **options)[1].detach()


def samples():
    """Varied calls: (options, tensors)."""
    tensors = inputs(dtype=torch.float32)
    grouped = inputs(q_len=5, heads=4, kv_heads=2, value_dim=3, dtype=torch.float32)
    masks = {"key_mask": torch.rand(2, 7) > 0.3, "query_mask": torch.rand(2, 7) > 0.3}
    packed = {"cu_seqlens_q": torch.tensor([0, 3, 3, 7], dtype=torch.int32)}
    one = inputs(batch=1, dtype=torch.float64)
    return {
        "plain": ({}, tensors),
        "causal_cosine": (CAUSAL, grouped),
        "starts": (
            {**CAUSAL, "q_start": torch.tensor(4), "kv_start": torch.tensor([1, 2])},
            tensors,
        ),
        "masks": ({"feature_map": "elu1", **masks}, tensors),
        "packed": ({**CAUSAL, **packed}, one),
        "state": ({**CAUSAL, "state": state_for(*tensors, **CAUSAL)}, tensors),
        "rotary": ({"feature_map": "elu1", "rotary_base": 50.0, "normalizer": "none"}, tensors),
    }


NAMES = ["plain", "causal_cosine", "starts", "masks", "packed", "state", "rotary"]


@pytest.mark.parametrize("name", NAMES)
def test_opcheck_linear_attention(name):
    options, tensors = samples()[name]
    tensors = [t.requires_grad_() for t in tensors]
    return_state = name in ("causal_cosine", "packed", "state")
    args = (*arguments(*tensors, **options), *spec(options), return_state, name == "masks")
    torch.library.opcheck(OPS.linear_attention.default, args)


@pytest.mark.parametrize("name", NAMES)
def test_opcheck_linear_attention_backward(name):
    options, tensors = samples()[name]
    shared = arguments(*tensors, **options)
    out, denominator, *state = OPS.linear_attention(*shared, *spec(options), True, True)
    d_state = [torch.randn_like(t) for t in state[:2]] if name != "plain" else [None, None]
    needs = [True, name != "masks", True] + [name == "state"] * 2
    args = (torch.randn_like(out), *d_state, out, denominator, needs, *shared)
    torch.library.opcheck(OPS.linear_attention_backward.default, args)


def decode_arguments():
    q, k, v = inputs(batch=3, q_len=1, heads=4, kv_heads=2, dtype=torch.float32)
    state = state_for(*inputs(batch=3, heads=4, kv_heads=2, dtype=torch.float32), **CAUSAL)
    mask = torch.tensor([[True], [False], [True]])
    kv_state, k_sum, start, position = state[:4]
    return (
        *(q, k, v, kv_state, k_sum, position, start, mask, None),
        *("relu", 20, "sum", 1e-6, None, False),
        *state[4:9],
    )


def test_opcheck_decode_step():
    torch.library.opcheck(OPS.linear_attention_decode_step_.default, decode_arguments())


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("interleaved", [False, True])
def test_opcheck_rotary(start, interleaved):
    x = torch.randn(2, 5, 3, 8, requires_grad=True)
    positions = None if start else torch.randint(0, 99, (2, 5))
    args = (x, positions, start, 100.0, interleaved, False)
    torch.library.opcheck(OPS.apply_rotary.default, args)


def test_opcheck_sinusoidal():
    torch.library.opcheck(OPS.sinusoidal_positions.default, (5, 8))


def test_every_operator_is_checked_above():
    names = {
        name.split("::")[1]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("cosformer::")
    }
    checked = {
        "linear_attention",
        "linear_attention_backward",
        "linear_attention_decode_step_",
        "apply_rotary",
        "sinusoidal_positions",
        # In test_performer.py.
        "performer_attention",
        "performer_attention_backward",
        "performer_attention_decode_step_",
        "performer_projection",
        # In test_softmax_operators.py.
        "softmax_attention",
        "softmax_attention_backward",
        "softmax_attention_decode_step_",
        "linformer_attention",
        "longformer_attention",
        "bigbird_attention",
        "bigbird_block_mask",
        "t5_relative_bias",
    }
    # The portable paths are made of torch's own operators; the others take or give no tensors to
    # compute with.
    others = {
        "linear_attention_portable",
        "performer_attention_portable",
        "softmax_attention_portable",
        "linear_state_save",
        "linear_state_load",
        "version",
        "isa",
    }
    assert names == checked | others


@pytest.mark.parametrize("name", NAMES)
def test_portable_path_equals_the_kernels(name):
    options, tensors = samples()[name]
    args = (*arguments(*tensors, **options), *spec(options), True, True)
    limit = 1e-12 if tensors[0].dtype == torch.float64 else 2e-6
    for a, b in zip(OPS.linear_attention_portable(*args), OPS.linear_attention(*args), strict=True):
        assert a.dtype == b.dtype
        assert relative(a, b) <= limit


def test_no_output_aliases_an_input():
    options, tensors = samples()["state"]
    args = (*arguments(*tensors, **options), *spec(options), True, True)
    given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
    # With no keys at all the state passes through: still in memory of its own.
    empty = [t[:, :0] for t in tensors]
    nothing = (*arguments(*empty, **options), *spec(options), True, True)
    for out in (*OPS.linear_attention(*args), *OPS.linear_attention(*nothing)):
        assert out.numel() == 0 or out.untyped_storage().data_ptr() not in given


def test_fake_tensors_have_the_sizes_and_dtypes_of_real_ones():
    options, tensors = samples()["causal_cosine"]
    real = cosformer.linear_attention(*tensors, return_state=True, **options)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in tensors]
        out, state = cosformer.linear_attention(*fakes, return_state=True, **options)
        assert cosformer.sinusoidal_positions(3, 4).shape == (3, 4)
        with pytest.raises(RuntimeError, match="head_dim 4, key has 3"):
            cosformer.linear_attention(fakes[0], fakes[1][..., :3], fakes[2])
    for fake, expected in zip((out, *state[:4]), (real[0], *real[1][:4]), strict=True):
        assert fake.shape == expected.shape and fake.dtype == expected.dtype


def compiled(function, backend="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_behaviour_31_fullgraph_compile_equals_eager(backend):
    tensors = inputs(q_len=9, dtype=torch.float32)
    state = state_for(*tensors, **CAUSAL)

    mask = torch.rand(2, 9) > 0.3

    def step(q, k, v, state):
        return cosformer.linear_attention(
            q, k, v, state=state, return_state=True, key_mask=mask, **CAUSAL
        )

    grads = []
    for function in (step, compiled(step, backend)):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out, after = function(*leaves, state)
        assert isinstance(after, cosformer.LinearState) and after[4:] == state[4:]
        (out.sum() + after.kv_state.sum()).backward()
        grads.append([out, *after[:4], *(leaf.grad for leaf in leaves)])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_behaviour_31_dynamic_lengths_compile_once():
    counter = CompileCounter()
    torch._dynamo.reset()
    function = torch.compile(
        lambda q, k, v: cosformer.linear_attention(q, k, v, **CAUSAL),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    for length in (3, 4, 9):
        tensors = inputs(q_len=length, dtype=torch.float32)
        assert torch.equal(function(*tensors), cosformer.linear_attention(*tensors, **CAUSAL))
    assert counter.frame_count == 1


def test_compiled_decode_serves_every_position():
    tensors = inputs(q_len=6, dtype=torch.float32)
    expected = cosformer.linear_attention(*tensors, **CAUSAL)
    counter = CompileCounter()
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend=counter)
    def step(q, k, v, state):
        return cosformer.linear_attention(q, k, v, state=state, return_state=True, **CAUSAL)

    state = state_for(*(t[:, :1] for t in tensors), **CAUSAL)
    for t in range(1, 6):
        out, state = step(*(x[:, t : t + 1].contiguous() for x in tensors), state)
        assert relative(out, expected[:, t : t + 1]) < 1e-6
    assert counter.frame_count == 1
    # Starts as tensors likewise; as ints, at most once more (torch's automatic dynamic shapes).
    torch._dynamo.reset()
    counter.clear()
    at_start = torch.compile(
        lambda *t, start: cosformer.linear_attention(*t, q_start=start, kv_start=start, **CAUSAL),
        fullgraph=True,
        backend=counter,
    )
    for start in range(5):
        at_start(*tensors, start=torch.tensor(start))
    assert counter.frame_count == 1
    for start in range(5):
        at_start(*tensors, start=start)
    assert counter.frame_count <= 4


def test_compiled_decode_in_place():
    args = decode_arguments()
    q, k, v = args[:3]
    state = cosformer.LinearState(args[3], args[4], args[6], args[5], *args[-5:])
    eager, other = state.clone(), state.clone()

    def step(q, k, v, state):
        return cosformer.linear_attention_decode_step_(q, k, v, state)

    in_graph = compiled(step)
    for _ in range(3):
        a = step(q, k, v, eager)
        b = in_graph(q, k, v, other)
        assert torch.equal(a, b)
        for x, y in zip(eager[:4], other[:4], strict=True):
            assert torch.equal(x, y)
    assert (eager.position == state.position + 3).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    tensors = [t.requires_grad_() for t in inputs(q_len=9, dtype=torch.float32)]
    with torch.autocast("cpu", dtype=dtype):
        out, state = cosformer.linear_attention(*tensors, return_state=True, **CAUSAL)
        again = cosformer.linear_attention(*tensors, state=state, **CAUSAL)
    assert out.dtype == again.dtype == dtype
    assert state.kv_state.dtype == state.k_sum.dtype == torch.float32
    by_hand = cosformer.linear_attention(*(t.to(dtype) for t in tensors), **CAUSAL)
    assert torch.equal(out, by_hand)
    again.sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in tensors)
    step = [t[:, :1].detach() for t in tensors]
    with torch.autocast("cpu", dtype=dtype):
        assert cosformer.linear_attention_decode_step_(*step, state.detach()).dtype == dtype
        # Doubles are asked for on purpose and stay, as torch's own operators have it.
        doubles = [t.detach().double() for t in tensors]
        assert cosformer.linear_attention(*doubles).dtype == torch.float64


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_behaviour_5_output_dtype_is_input_dtype(dtype):
    tensors = [t.requires_grad_() for t in inputs(q_len=9, dtype=dtype)]
    mask = torch.rand(2, 9) > 0.3
    out, state = cosformer.linear_attention(*tensors, key_mask=mask, return_state=True, **CAUSAL)
    assert out.dtype == dtype
    assert state.kv_state.dtype == (dtype if dtype == torch.float64 else torch.float32)
    out.sum().backward()
    assert all(t.grad.dtype == dtype for t in tensors)
    assert cosformer.apply_rotary(tensors[0]).dtype == dtype


def test_autocast_does_not_reach_into_the_portable_path():
    tensors = [t.requires_grad_() for t in inputs(q_len=20, dim=8, dtype=torch.float32)]

    out = cosformer.linear_attention(*tensors, feature_map="elu1", **CAUSAL)
    first = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
    loss = sum(g.square().sum() for g in first)
    expected = torch.autograd.grad(loss, tensors, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(loss, tensors)
    for a, b in zip(found, expected, strict=True):
        assert relative(a, b) < 1e-5


def test_thread_count_changes_no_bit(two_threads):
    # One head, long enough to be cut into segments.
    tensors = inputs(batch=1, q_len=5000, heads=1, dim=32, dtype=torch.float32)

    def run():
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = cosformer.linear_attention(*leaves, is_causal=True, reweight_len=5000)
        out.square().sum().backward()
        return [out, *(leaf.grad for leaf in leaves)]

    with_two = run()
    torch.set_num_threads(1)
    for a, b in zip(with_two, run(), strict=True):
        assert torch.equal(a, b)


def test_inference_mode():
    tensors = inputs(dtype=torch.float32)
    expected, _ = cosformer.linear_attention(*tensors, return_state=True, **CAUSAL)
    with torch.inference_mode():
        out, state = cosformer.linear_attention(*tensors, return_state=True, **CAUSAL)
        cosformer.linear_attention_decode_step_(*(t[:, :1] for t in tensors), state)
    assert torch.equal(out, expected)
