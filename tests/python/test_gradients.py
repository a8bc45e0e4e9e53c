"""gradcheck and gradgradcheck in float64 over every option, the state included (behaviour 28)."""

import cosformer
import pytest
import torch
from helpers import definition, gradients, inputs, relative
from torch.autograd import gradcheck, gradgradcheck


def mask(*size):
    return torch.rand(*size, generator=torch.Generator().manual_seed(3)) > 0.3


def offsets(*values):
    return torch.tensor(values, dtype=torch.int32)


CASES = {
    "noncausal": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "cosine": ({}, {"reweight_len": 20}),
    "cosine_causal": ({"kv_heads": 1}, {"reweight_len": 20, "is_causal": True}),
    "grouped_values": (
        {"heads": 4, "kv_heads": 2, "value_dim": 3},
        {"reweight_len": 20, "is_causal": True},
    ),
    "elu1": ({}, {"feature_map": "elu1", "is_causal": True}),
    "elu1_cosine": ({}, {"feature_map": "elu1", "reweight_len": 20}),
    "rotary": ({}, {"feature_map": "elu1", "rotary_base": 50.0, "is_causal": True}),
    "rotary_interleaved_cosine": (
        {"kv_len": 5},
        {"feature_map": "elu1", "rotary_base": 50.0, "rotary_interleaved": True, "reweight_len": 9},
    ),
    "masks": ({}, {"key_mask": mask(2, 7), "query_mask": mask(2, 7), "reweight_len": 9}),
    "masks_causal": (
        {},
        {
            "key_mask": mask(2, 7),
            "query_mask": mask(2, 7),
            "is_causal": True,
            "feature_map": "elu1",
        },
    ),
    "starts": (
        {"q_len": 4, "kv_len": 6},
        {
            "q_start": torch.tensor([3, 6]),
            "kv_start": torch.tensor([0, 2]),
            "is_causal": True,
            "reweight_len": 20,
        },
    ),
    "packed": (
        {"batch": 1, "q_len": 6, "kv_len": 8},
        {
            "cu_seqlens_q": offsets(0, 4, 4, 6),
            "cu_seqlens_k": offsets(0, 3, 5, 8),
            "reweight_len": 20,
            "is_causal": True,
        },
    ),
    "normalizer_none": ({}, {"normalizer": "none", "is_causal": True, "reweight_len": 20}),
    "one_token": ({"q_len": 1}, {"is_causal": True, "reweight_len": 20}),
}


# A state gives the starts.
WITH_STATE = [(name, False) for name in CASES] + [
    (name, True) for name in CASES if name != "starts"
]


@pytest.mark.parametrize(("case", "with_state"), WITH_STATE)
def test_gradcheck_and_gradgradcheck(case, with_state):
    """Of the output and the outgoing state, by q, k, v and the incoming state."""
    shape, options = CASES[case]
    tensors = [t.requires_grad_() for t in inputs(**shape)]
    state = None
    if with_state:
        packed = "cu_seqlens_q" in options
        rows = 3 if packed else tensors[0].shape[0]
        kv_heads, dim, value_dim = tensors[1].shape[2], tensors[0].shape[3], tensors[2].shape[3]
        features = dim * (2 if "reweight_len" in options else 1)
        position = torch.arange(rows) + 1
        state = cosformer.LinearState(
            torch.rand(rows, kv_heads, features, value_dim, dtype=torch.float64),
            torch.rand(rows, kv_heads, features, dtype=torch.float64) + 1,
            torch.zeros_like(position),
            position,
            "linear",
            options.get("feature_map", "relu"),
            options.get("reweight_len", 0),
            options.get("rotary_base", 0.0),
            options.get("rotary_interleaved", False),
        )
        tensors += [state.kv_state.requires_grad_(), state.k_sum.requires_grad_()]

    def function(q, k, v, *sums):
        before = state._replace(kv_state=sums[0], k_sum=sums[1]) if sums else None
        out, after = cosformer.linear_attention(q, k, v, state=before, return_state=True, **options)
        return out, after.kv_state, after.k_sum

    assert gradcheck(function, tensors, fast_mode=True)
    assert gradgradcheck(function, tensors, fast_mode=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradcheck_element_by_element(is_causal):
    tensors = [t.requires_grad_() for t in inputs(batch=1, q_len=4, heads=1)]
    options = {"reweight_len": 9, "is_causal": is_causal}
    function = lambda *t: cosformer.linear_attention(*t, **options)  # noqa: E731
    assert gradcheck(function, tensors)
    assert gradgradcheck(function, tensors)


def test_third_order():
    q, k, v = inputs(q_len=4)
    q.requires_grad_()

    def cubed(call):
        first = call(q).pow(2).sum()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(first, q, create_graph=True)
            first = gradient.pow(2).sum()
        return gradient

    options = {"feature_map": "elu1", "reweight_len": 9, "is_causal": True}
    found = cubed(lambda q: cosformer.linear_attention(q, k, v, **options))
    assert relative(found, cubed(lambda q: definition(q, k, v, **options))) < 1e-10


def test_one_tensor_as_query_key_and_value_twice_differentiable():
    x = torch.randn(1, 5, 1, 4, dtype=torch.float64, requires_grad=True)
    options = {"feature_map": "elu1", "is_causal": True}
    assert gradgradcheck(lambda x: cosformer.linear_attention(x, x, x, **options), [x])


def test_gradient_of_the_backward_operator_by_the_outgoing_gradient_alone():
    q, k, v = inputs()
    q.requires_grad_()
    grad = torch.randn(2, 7, 2, 4, dtype=torch.float64, requires_grad=True)

    def function(grad):
        out = cosformer.linear_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out, q, grad, create_graph=True)[0]

    assert gradcheck(function, [grad])


@pytest.mark.parametrize("lengths", [(1, 1), (256, 3)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_behaviour_10_gradients_at_extreme_lengths(lengths, is_causal):
    tensors = inputs(q_len=lengths[0], kv_len=lengths[1], dim=8)
    options = {"reweight_len": 300, "is_causal": is_causal}
    out, found = gradients(lambda *t: cosformer.linear_attention(*t, **options), tensors)
    expected_out, expected = gradients(lambda *t: definition(*t, **options), tensors)
    assert relative(out, expected_out) < 1e-12
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_behaviour_29_noncontiguous_inputs_and_gradients(dtype):
    q, k, v = inputs(q_len=70, dim=16, dtype=dtype)
    grad = torch.randn_like(q)

    def strided(t):
        """The same values: heads before the sequence, every second element of the last dim."""
        wide = torch.empty(t.shape[0], t.shape[2], t.shape[1], 2 * t.shape[3], dtype=dtype)
        view = wide[..., ::2].transpose(1, 2)
        return view.copy_(t)

    call = lambda *t: cosformer.linear_attention(*t, is_causal=True, reweight_len=99)  # noqa: E731
    out, expected = gradients(call, (q, k, v), grad)
    leaves = [strided(t).detach().requires_grad_() for t in (q, k, v)]
    assert not leaves[0].is_contiguous() and leaves[0].stride(-1) == 2
    again = call(*leaves)
    again.backward(strided(grad))
    assert torch.equal(again, out)
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert torch.equal(leaf.grad, gradient)
    # sum() sends back one element expanded to the whole shape.
    _, by_ones = gradients(call, (q, k, v))
    call(*leaves).sum().backward()
    for leaf, gradient, ones in zip(leaves, expected, by_ones, strict=True):
        torch.testing.assert_close(
            leaf.grad - gradient, ones, rtol=1e-2, atol=1e-2 if dtype.itemsize == 2 else 1e-5
        )


def test_only_the_gradients_asked_for():
    q, k, v = inputs()
    v.requires_grad_()
    out, state = cosformer.linear_attention(q, k, v, is_causal=True, return_state=True)
    (dv,) = torch.autograd.grad(out.sum() + state.kv_state.sum(), v)
    expected = gradients(lambda v: definition(q, k, v, is_causal=True), [v])[1][0]
    expected = expected + torch.relu(k).sum(-1, keepdim=True)
    assert relative(dv, expected) < 1e-12
    assert not state.position.requires_grad


def test_forward_mode_and_functorch_are_refused():
    q, k, v = inputs()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(RuntimeError, match="jvp is not implemented"):
            cosformer.linear_attention(dual, k, v)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda q: cosformer.linear_attention(q, k, v).sum())(q)


def test_rotary_gradients():
    x = torch.randn(2, 5, 2, 6, dtype=torch.float64, requires_grad=True)
    positions = torch.tensor([[0, 4, 2, 9, 1], [7, 7, 0, 1, 100]])
    for options in ({"start": 3}, {"positions": positions, "interleaved": True}):
        function = lambda x, o=options: cosformer.apply_rotary(x, base=100.0, **o)  # noqa: E731
        assert gradcheck(function, [x])
        assert gradgradcheck(function, [x])
