"""What other libraries' tests ask of their attentions, asked of ours.

idiap/fast-transformers: tests/attention/test_{linear,causal_linear,full,local}_attention.py,
test_attention_layer.py, tests/causal_product, tests/local_product, tests/feature_maps,
tests/recurrent/attention/{self,cross}_attention, tests/recurrent/test_transformer_encoder.py,
test_transformer_decoder.py, tests/test_weight_mapper.py. By their meaning, in our words; the sizes
are smaller where nothing follows from them. lucidrains/performer-pytorch ships no tests: what its
README and its attention module promise (shapes, masks, the causal form, redrawing, the
approximation) stands in for them.
"""

import copy

import cosformer
import pytest
import torch
from helpers import relative
from torch import nn

BATCH, Q_LEN, KV_LEN, HEADS, DIM, VALUE_DIM = 10, 5, 8, 4, 32, 64


def tensors(q_len=Q_LEN, kv_len=KV_LEN, batch=BATCH, dim=DIM, value_dim=VALUE_DIM):
    return (
        torch.rand(batch, q_len, HEADS, dim),
        torch.rand(batch, kv_len, HEADS, dim),
        torch.rand(batch, kv_len, HEADS, value_dim),
    )


def length_mask(lengths, max_len):
    return torch.arange(max_len) < torch.tensor(lengths)[:, None]


FUNCTIONS = {
    "linear": lambda q, k, v, **o: cosformer.linear_attention(q, k, v, feature_map="elu1", **o),
    "full": cosformer.softmax_attention,
    "favor": lambda q, k, v, **o: cosformer.performer_attention(
        q, k, v, cosformer.performer_projection(64, q.shape[-1], seed=0), **o
    ),
}


# fast-transformers: attention


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(5, 8), (5, 5), (5, 10), (10, 5)])
def test_forward_is_contiguous_whatever_the_lengths(name, is_causal, lengths):
    out = FUNCTIONS[name](*tensors(*lengths), is_causal=is_causal)
    assert out.is_contiguous() and out.shape == (BATCH, lengths[0], HEADS, VALUE_DIM)
    assert out.isfinite().all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_masking_pays_attention_to_the_lengths_of_keys(name):
    q, k, v = tensors(kv_len=10, value_dim=1)
    for row in range(9):
        v[row, row + 1 :] = 1e9
    out = FUNCTIONS[name](q, k, v, key_mask=length_mask(list(range(1, 11)), 10))
    assert out.max() < 1


def test_an_arbitrary_attention_mask_has_no_place():
    """Theirs raises for linear attention; here no function takes one, and a layer says so."""
    q, k, v = tensors()
    with pytest.raises(TypeError, match="attn_mask"):
        cosformer.linear_attention(q, k, v, attn_mask=torch.rand(Q_LEN, KV_LEN) > 0.5)
    model = cosformer.replace_attention(nn.MultiheadAttention(16, 2), kind="linear")
    x = torch.rand(5, 1, 16)
    with pytest.raises(ValueError, match="attn_mask .* is not causal"):
        model(x, x, x, attn_mask=torch.rand(5, 5) > 0.5)


def test_local_attention_equals_full_attention_through_the_same_window():
    q, k, v = tensors(64, 64, batch=3)
    near = (torch.arange(64)[:, None] - torch.arange(64)).abs() < 9
    local = cosformer.softmax_attention(q, k, v, window=(8, 8), scale=1.0)
    scores = torch.einsum("nlhe,nshe->nhls", q, k).masked_fill(~near, -torch.inf)
    full = torch.einsum("nhls,nshd->nlhd", scores.softmax(-1), v)
    torch.testing.assert_close(local, full, atol=1e-5, rtol=1e-5)


def test_local_attention_of_short_rows_has_no_nan():
    q, k, v = tensors(64, 64, batch=3, value_dim=32)
    mask = length_mask([8, 16, 64], 64)
    out = cosformer.softmax_attention(q, k, v, window=(8, 8), key_mask=mask, query_mask=mask)
    assert not out.isnan().any()


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_layer_gives_its_widths_to_the_heads(kind):
    x, memory = torch.rand(10, 5, 100), torch.rand(10, 8, 100)
    for options in ({}, {"head_dim": 32, "value_dim": 64}):
        layer = cosformer.nn.attention(kind, 100, 4, **options)
        dim, value_dim = options.get("head_dim", 25), options.get("value_dim", 25)
        assert layer.q_proj.out_features == layer.k_proj.out_features == 4 * dim
        assert layer.v_proj.out_features == layer.out_proj.in_features == 4 * value_dim
        assert layer(x, memory, memory).shape == (10, 5, 100)


# fast-transformers: causal_product, local_product


@pytest.mark.parametrize("seed", range(4))
def test_causal_product_forward_and_backward(seed):
    torch.manual_seed(seed)
    dim, value_dim = torch.randint(10, 100, (2,)).tolist()
    leaves = [t.requires_grad_() for t in tensors(50, 50, 2, dim, value_dim)]
    out = cosformer.linear_attention(
        *leaves, feature_map="identity", is_causal=True, normalizer="none"
    )
    q, k, v = leaves
    product = torch.einsum("nlhe,nshe->nhls", q, k).tril()
    expected = torch.einsum("nhls,nshm->nlhm", product, v)
    grad = torch.rand_like(out)
    found_grads = torch.autograd.grad(out, leaves, grad)
    expected_grads = torch.autograd.grad(expected, leaves, grad)
    for a, b in zip((out, *found_grads), (expected, *expected_grads), strict=True):
        assert ((a - b) / (b.abs() + 1e-6)).abs().max() < 1e-5


@pytest.mark.parametrize("context", [8, 13, 23])
def test_local_product_forward_and_backward(context):
    leaves = [t.requires_grad_() for t in tensors(50, 50, 2, 17, 11)]
    left, right = context // 2, context - context // 2 - 1
    out = cosformer.softmax_attention(*leaves, window=(left, right))
    q, k, v = leaves
    rows = []
    for i in range(50):
        seen = slice(max(0, i - left), min(50, i + right + 1))
        weights = torch.einsum("nhe,nshe->nhs", q[:, i], k[:, seen]) / 17**0.5
        rows.append(torch.einsum("nhs,nshd->nhd", weights.softmax(-1), v[:, seen]))
    expected = torch.stack(rows, 1)
    grad = torch.rand_like(out)
    for a, b in zip(
        (out, *torch.autograd.grad(out, leaves, grad)),
        (expected, *torch.autograd.grad(expected, leaves, grad)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


# fast-transformers: recurrent


def layer_of(kind, **options):
    return cosformer.nn.attention(kind, 100, HEADS, is_causal=True, **options).eval()


@pytest.mark.parametrize("kind", ["linear", "softmax", "performer"])
def test_recurrent_state_has_the_sizes_of_what_it_holds(kind):
    layer = layer_of(kind, head_dim=25, value_dim=16)
    state = None
    for count in (1, 2, 3):
        out, state = layer.decode_step(torch.rand(BATCH, 1, 100), state)
        assert out.shape == (BATCH, 1, 100)
        if kind == "softmax":
            assert state.size == count
            assert state.keys.shape[2:] == (HEADS, 25) and state.values.shape[2:] == (HEADS, 16)
        else:
            features = 25 if kind == "linear" else 100
            assert state.kv_state.shape == (BATCH, HEADS, features, 16)
            assert state.k_sum.shape == (BATCH, HEADS, features)
        assert (state.position == count).all()


@pytest.mark.parametrize("kind", ["linear", "softmax", "performer"])
def test_recurrent_self_attention_equals_the_parallel_form(kind):
    layer = layer_of(kind)
    x = torch.rand(BATCH, 60, 100)
    with torch.no_grad():
        expected = layer(x)
    state, parts = None, []
    for t in range(60):
        out, state = layer.decode_step(x[:, t : t + 1], state)
        parts.append(out)
    assert (torch.cat(parts, 1) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["linear", "softmax", "performer"])
def test_recurrent_cross_attention_equals_the_parallel_form(kind):
    """Query by query over a memory; for linear kinds over the state that holds it."""
    layer = cosformer.nn.attention(kind, 100, HEADS).eval()
    x, memory = torch.rand(BATCH, 12, 100), torch.rand(BATCH, 42, 100)
    with torch.no_grad():
        expected = layer(x, memory)
        if kind == "softmax":
            steps = [layer(x[:, t : t + 1], memory) for t in range(12)]
        else:
            none = memory[:, :0]
            _, state = layer(x[:, :0], memory, return_state=True)
            steps = [layer(x[:, t : t + 1], none, state=state) for t in range(12)]
    assert (torch.cat(steps, 1) - expected).abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_recurrent_encoder_of_blocks(kind):
    blocks = [cosformer.nn.Block(layer_of(kind), 50).eval() for _ in range(3)]
    x = torch.rand(4, 7, 100)
    expected = x
    with torch.no_grad():
        for block in blocks:
            expected = block(expected)
    states, parts = [None] * 3, []
    for t in range(7):
        y = x[:, t : t + 1]
        for i, block in enumerate(blocks):
            y, states[i] = block.decode_step(y, states[i])
        parts.append(y)
    assert all(part.shape == (4, 1, 100) for part in parts)
    assert (torch.cat(parts, 1) - expected).abs().max() < 1e-5


# fast-transformers: weights of torch's own encoder


def test_weights_of_a_torch_encoder_give_the_same_results():
    layer = nn.TransformerEncoderLayer(128, 4, dim_feedforward=256)
    old = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    new = cosformer.replace_attention(copy.deepcopy(old), kind="softmax")
    x = torch.rand(10, 3, 128)
    assert (new(x) - old(x)).abs().max() < 1e-5
    # By hand into blocks, which the mapping of names is.
    state, blocks = old.state_dict(), []
    for i in range(2):
        attention = cosformer.nn.SoftmaxAttention(128, 4)
        block = cosformer.nn.Block(attention, 256, activation="relu", pre_norm=False)
        own = {}
        for part in ("weight", "bias"):
            at = f"layers.{i}."
            q, k, v = state[f"{at}self_attn.in_proj_{part}"].chunk(3)
            own |= {
                f"attention.q_proj.{part}": q,
                f"attention.k_proj.{part}": k,
                f"attention.v_proj.{part}": v,
                f"attention.out_proj.{part}": state[f"{at}self_attn.out_proj.{part}"],
                f"ffn.up_proj.{part}": state[f"{at}linear1.{part}"],
                f"ffn.down_proj.{part}": state[f"{at}linear2.{part}"],
                f"attention_norm.{part}": state[f"{at}norm1.{part}"],
                f"ffn_norm.{part}": state[f"{at}norm2.{part}"],
            }
        block.load_state_dict(own, strict=True)
        blocks.append(block)
    y = x.transpose(0, 1)
    for block in blocks:
        y = block(y)
    assert (y.transpose(0, 1) - old(x)).abs().max() < 1e-5


# Both: random features


def test_orthogonal_projections_are_orthogonal():
    rows = cosformer.performer_projection(64, 32, seed=1)
    for block in rows.split(32):
        product = block @ block.t()
        assert (product - product.diag().diag()).abs().max() < 1e-4
    gaussian = cosformer.performer_projection(64, 32, orthogonal=False, seed=1)
    assert ((gaussian @ gaussian.t())[~torch.eye(64, dtype=torch.bool)]).abs().max() > 1


@pytest.mark.parametrize("orthogonal", [True, False])
def test_positive_features_approximate_the_exponential(orthogonal):
    # Unnormalised weights by the sum of features of the state.
    dim, num_features = 32, 32 * 1000
    projection = cosformer.performer_projection(num_features, dim, orthogonal=orthogonal, seed=0)
    x, y = (torch.randn(40, dim) * 0.15 for _ in range(2))

    def features(z):
        return (z @ projection.t() - z.square().sum(-1, keepdim=True) / 2).exp()

    estimate = features(x) @ features(y).t() / num_features
    exact = (x @ y.t()).exp()
    assert (estimate - exact).square().mean() < 1e-3
    # The operator's rows are those estimates, normalised; it scales by dim ** -1/4.
    q, k = (z[None, :, None] * dim**0.25 for z in (x, y))
    weights = cosformer.attention_matrix("performer", q, k, projection=projection)[0, 0]
    assert relative(weights, estimate / estimate.sum(-1, keepdim=True)) < 1e-5


def test_projection_is_shared_by_calls_and_redrawn_when_asked():
    layer = cosformer.nn.PerformerAttention(4 * 32, 4, num_features=64)
    x = torch.rand(3, 20, 4 * 32)
    y = layer(layer(x))
    y.sum().backward()
    assert layer.q_proj.weight.grad.isfinite().all()
    first = layer(x)
    layer.redraw_projection(1)
    second = layer(x)
    layer.eval()
    assert not torch.allclose(first, second)
    assert torch.equal(second, layer(x))  # nothing is redrawn unasked, training or not
    layer.redraw_projection(0)
    assert torch.equal(first, layer(x))


# performer-pytorch: what its README and module promise


@pytest.mark.parametrize("is_causal", [False, True])
def test_performer_self_and_cross_attention(is_causal):
    layer = cosformer.nn.PerformerAttention(64, 4, is_causal=is_causal, num_features=64)
    x = torch.randn(2, 30, 64)
    mask = length_mask([30, 21], 30)
    assert layer(x).shape == layer(x, key_mask=mask).shape == (2, 30, 64)
    context, context_mask = torch.randn(2, 17, 64), length_mask([17, 9], 17)
    starts = {"q_start": 17} if is_causal else {}
    out = layer(x, context, key_mask=context_mask, **starts)
    assert out.shape == (2, 30, 64)
    # What the mask hides has no say.
    other = torch.where(context_mask[..., None], context, 1e3)
    assert torch.equal(layer(x, other, key_mask=context_mask, **starts), out)


def test_performer_causal_form_sees_no_later_token():
    layer = cosformer.nn.PerformerAttention(64, 4, is_causal=True)
    x = torch.randn(1, 30, 64, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x)[:, 11].sum(), x)
    assert (grad[:, 12:] == 0).all() and (grad[:, :12] != 0).any(-1).all()


def test_performer_approaches_softmax_attention_as_features_grow():
    exact = cosformer.nn.SoftmaxAttention(64, 4).eval()
    x = torch.randn(1, 40, 64)
    errors = []
    for num_features in (16, 256, 4096):
        layer = cosformer.nn.PerformerAttention(64, 4, num_features=num_features).eval()
        layer.load_state_dict(exact.state_dict(), strict=False)
        errors.append(relative(layer(x), exact(x)))
    assert errors[0] > errors[1] > errors[2] and errors[2] < 0.05


def test_performer_of_one_key_head_for_many_query_heads():
    layer = cosformer.nn.PerformerAttention(64, 4, num_kv_heads=1, is_causal=True)
    assert layer.k_proj.out_features == 16
    assert layer(torch.randn(2, 9, 64)).shape == (2, 9, 64)
