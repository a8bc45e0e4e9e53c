"""gradcheck and gradgradcheck of softmax attention and its kinds in float64 (behaviours 10, 28,
29)."""

import cosformer
import pytest
import torch
from helpers import gradients, inputs, relative
from softmax_helpers import definition, patterns, tokens
from torch.autograd import gradcheck, gradgradcheck


def mask(*size):
    return torch.rand(*size, generator=torch.Generator().manual_seed(3)) > 0.3


CASES = {name: ({}, options) for name, options in patterns(7).items()} | {
    "grouped_values": ({"heads": 4, "kv_heads": 2, "value_dim": 3}, {"is_causal": True}),
    "masks": ({}, {"key_mask": mask(2, 7), "query_mask": mask(2, 7)}),
    "masks_window": ({}, {"key_mask": mask(2, 7), "query_mask": mask(2, 7), "window": (2, 1)}),
    "starts": (
        {"q_len": 4, "kv_len": 6},
        {
            "q_start": torch.tensor([3, 6]),
            "kv_start": torch.tensor([0, 2]),
            "is_causal": True,
            "scale": 1.3,
        },
    ),
    "packed": (
        {"batch": 1, "q_len": 6, "kv_len": 8},
        {
            "cu_seqlens_q": torch.tensor([0, 4, 4, 6], dtype=torch.int32),
            "cu_seqlens_k": torch.tensor([0, 3, 5, 8], dtype=torch.int32),
            "is_causal": True,
            "window": (3, 0),
        },
    ),
    "dropout": ({}, {"dropout_p": 0.4, "dropout_seed": 5, "is_causal": True}),
    "one_token": ({"q_len": 1}, {}),
    "no_keys": ({"kv_len": 0}, {}),
}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_gradcheck_and_gradgradcheck(case, with_bias):
    """By q, k, v and the relative bias."""
    shape, options = CASES[case]
    tensors = [t.requires_grad_() for t in inputs(**shape)]
    if with_bias:
        heads = tensors[0].shape[2]
        tensors.append(torch.randn(heads, 7, dtype=torch.float64, requires_grad=True))

    def function(q, k, v, *bias):
        named = {"relative_bias": bias[0]} if bias else {}
        return cosformer.softmax_attention(q, k, v, **named, **options)

    assert gradcheck(function, tensors, fast_mode=True)
    assert gradgradcheck(function, tensors, fast_mode=True)


def test_gradcheck_element_by_element():
    tensors = [t.requires_grad_() for t in inputs(batch=1, q_len=4, heads=1)]
    function = lambda *t: cosformer.softmax_attention(*t, is_causal=True)  # noqa: E731
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

    options = {"is_causal": True, "window": (2, 0)}
    found = cubed(lambda q: cosformer.softmax_attention(q, k, v, **options))
    assert relative(found, cubed(lambda q: definition(q, k, v, **options))) < 1e-10


def test_one_tensor_as_query_key_and_value_twice_differentiable():
    x = torch.randn(1, 5, 1, 4, dtype=torch.float64, requires_grad=True)
    assert gradgradcheck(lambda x: cosformer.softmax_attention(x, x, x, is_causal=True), [x])


def test_gradient_of_the_backward_operator_by_the_outgoing_gradient_alone():
    q, k, v = inputs()
    q.requires_grad_()
    grad = torch.randn(2, 7, 2, 4, dtype=torch.float64, requires_grad=True)

    def function(grad):
        out = cosformer.softmax_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out, q, grad, create_graph=True)[0]

    assert gradcheck(function, [grad])


@pytest.mark.parametrize("lengths", [(1, 1), (256, 3)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_behaviour_10_gradients_at_extreme_lengths(lengths, is_causal):
    tensors = inputs(q_len=lengths[0], kv_len=lengths[1], dim=8)
    options = {"is_causal": is_causal}
    out, found = gradients(lambda *t: cosformer.softmax_attention(*t, **options), tensors)
    expected_out, expected = gradients(lambda *t: definition(*t, **options), tensors)
    assert relative(out, expected_out) < 1e-12
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_behaviour_29_noncontiguous_inputs_and_gradients(dtype):
    q, k, v = inputs(q_len=70, dim=16, dtype=dtype)
    bias = torch.randn(2, 9)
    grad = torch.randn_like(q)

    def strided(t):
        """The same values: heads before the sequence, every second element of the last dim."""
        wide = torch.empty(t.shape[0], t.shape[2], t.shape[1], 2 * t.shape[3], dtype=dtype)
        view = wide[..., ::2].transpose(1, 2)
        return view.copy_(t)

    call = lambda q, k, v, b: cosformer.softmax_attention(  # noqa: E731
        q, k, v, relative_bias=b, is_causal=True, window=(40, 0)
    )
    out, expected = gradients(call, (q, k, v, bias), grad)
    leaves = [strided(t).detach().requires_grad_() for t in (q, k, v)]
    leaves.append(bias.t().contiguous().t().requires_grad_())
    assert not leaves[0].is_contiguous() and leaves[0].stride(-1) == 2
    again = call(*leaves)
    again.backward(strided(grad))
    assert torch.equal(again, out)
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert torch.equal(leaf.grad, gradient)
    # sum() sends back one element expanded to the whole shape.
    _, by_ones = gradients(call, (q, k, v, bias))
    for leaf in leaves:
        leaf.grad = None
    call(*leaves).sum().backward()
    for leaf, ones in zip(leaves, by_ones, strict=True):
        assert torch.equal(leaf.grad, ones)


def test_only_the_gradients_asked_for():
    q, k, v = inputs()
    v.requires_grad_()
    (dv,) = torch.autograd.grad(cosformer.softmax_attention(q, k, v).sum(), v)
    expected = gradients(lambda v: definition(q, k, v), [v])[1][0]
    assert relative(dv, expected) < 1e-12
    bias = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    out = cosformer.softmax_attention(q, k, v.detach(), relative_bias=bias)
    (found,) = torch.autograd.grad(out.square().sum(), bias)
    reference = definition(q, k, v.detach(), relative_bias=bias)
    assert relative(found, torch.autograd.grad(reference.square().sum(), bias)[0]) < 1e-11


def test_forward_mode_and_functorch_are_refused():
    q, k, v = inputs()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(RuntimeError, match="jvp is not implemented"):
            cosformer.softmax_attention(dual, k, v)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda q: cosformer.softmax_attention(q, k, v).sum())(q)


# The kinds.


@pytest.mark.parametrize("masked", [False, True])
def test_linformer(masked):
    tensors = [t.requires_grad_() for t in inputs(q_len=4, kv_len=6)]
    tensors += [torch.randn(8, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    options = {"key_mask": mask(2, 6), "query_mask": mask(2, 4)} if masked else {}
    function = lambda *t: cosformer.linformer_attention(*t, **options)  # noqa: E731
    assert gradcheck(function, tensors, fast_mode=True)
    assert gradgradcheck(function, tensors, fast_mode=True)


LONGFORMER = {
    "noncausal": {},
    "causal": {"is_causal": True},
    "masks": {"key_mask": mask(2, 7), "query_mask": mask(2, 7)},
    "dilated": {"dilation": 2, "is_causal": True},
}


@pytest.mark.parametrize("case", LONGFORMER)
def test_longformer(case):
    tensors = [t.requires_grad_() for _ in range(2) for t in inputs()]
    options = {"window": (1, 1), "global_mask": tokens(2, 7, 0, 5)} | LONGFORMER[case]
    options["global_mask"][1, 5] = False
    function = lambda *t: cosformer.longformer_attention(*t, **options)  # noqa: E731
    assert gradcheck(function, tensors, fast_mode=True)
    assert gradgradcheck(function, tensors, fast_mode=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_bigbird(is_causal):
    tensors = [t.requires_grad_() for t in inputs(q_len=11)]
    options = {"block_size": 2, "num_random_blocks": 1, "is_causal": is_causal}
    function = lambda *t: cosformer.bigbird_attention(*t, **options)  # noqa: E731
    assert gradcheck(function, tensors, fast_mode=True)
    assert gradgradcheck(function, tensors, fast_mode=True)


def test_t5_relative_bias():
    tensors = [t.requires_grad_() for t in inputs()]
    weight = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)

    def function(q, k, v, weight):
        bias = cosformer.t5_relative_bias(weight, bidirectional=False, max_distance=6)
        return cosformer.softmax_attention(q, k, v, relative_bias=bias, is_causal=True)

    assert gradcheck(function, [*tensors, weight], fast_mode=True)
    assert gradgradcheck(function, [*tensors, weight], fast_mode=True)
