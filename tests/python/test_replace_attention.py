"""replace_attention: another kind inside a model of nn.MultiheadAttention, its parameters kept."""

import copy

import cosformer
import pytest
import torch
from helpers import relative
from torch import nn

OPTIONS = {
    "softmax": {},
    "linear": {"dropout": 0.0},
    "cosformer": {"reweight_len": 64, "dropout": 0.0},
    "performer": {"dropout": 0.0},
    "linformer": {"max_len": 32, "projected_len": 8},
    "longformer": {"window": 3, "global_tokens": 1},
    "bigbird": {"block_size": 4, "num_random_blocks": 1},
}


def replaced(module, kind="softmax", **options):
    return cosformer.replace_attention(
        copy.deepcopy(module), kind=kind, **{**OPTIONS[kind], **options}
    )


def results(module, tensors, rows=None, **call):
    """Output and gradients, those of the parameters by name of the new layer."""
    module.zero_grad()
    leaves = [t.clone().requires_grad_() for t in tensors]
    if len(leaves) == 1:
        leaves = leaves * 3
    out, weights = module(*leaves, **call)
    shown = out if rows is None else out * rows
    shown.square().sum().backward()
    return shown.detach(), [leaf.grad for leaf in leaves], weights


def own_gradients(old, new):
    """Pairs of gradients of what was kept."""
    layer = new.attention
    split = old.in_proj_weight is not None
    weights = (
        old.in_proj_weight.grad.chunk(3)
        if split
        else [old.q_proj_weight.grad, old.k_proj_weight.grad, old.v_proj_weight.grad]
    )
    for child, grad in zip((layer.q_proj, layer.k_proj, layer.v_proj), weights, strict=True):
        yield child.weight.grad, grad
    if old.in_proj_bias is not None:
        q, _, v = old.in_proj_bias.grad.chunk(3)
        yield layer.q_proj.bias.grad, q
        yield layer.v_proj.bias.grad, v
        yield layer.out_proj.bias.grad, old.out_proj.bias.grad
    yield layer.out_proj.weight.grad, old.out_proj.weight.grad


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [{}, {"kdim": 10, "vdim": 6}])
@pytest.mark.parametrize("form", ["plain", "padding", "causal", "both"])
def test_softmax_equals_the_original(batch_first, bias, widths, form):
    old = nn.MultiheadAttention(16, 4, bias=bias, batch_first=batch_first, **widths)
    if bias:
        nn.init.normal_(old.in_proj_bias)
        nn.init.normal_(old.out_proj.bias)
    new = replaced(old)
    lengths = (7, 7) if widths == {} else (7, 9)
    tensors = [
        torch.randn(3, lengths[0], 16),
        torch.randn(3, lengths[1], widths.get("kdim", 16)),
        torch.randn(3, lengths[1], widths.get("vdim", 16)),
    ]
    if widths == {}:
        tensors = tensors[:1]
    if not batch_first:
        tensors = [t.transpose(0, 1) for t in tensors]
    call = {}
    if form in ("padding", "both"):
        length = torch.tensor([lengths[1], 4, 1])
        call["key_padding_mask"] = torch.arange(lengths[1]) >= length[:, None]
    if form in ("causal", "both"):
        call["attn_mask"] = torch.ones(lengths, dtype=torch.bool).triu(1)
    out, grads, _ = results(old, tensors, need_weights=False, **call)
    found, found_grads, weights = results(new, tensors, **call)
    assert weights is None
    assert relative(found, out) <= 3e-6
    for a, b in (*zip(found_grads, grads, strict=True), *own_gradients(old, new)):
        assert relative(a, b) <= 1e-5
    # The same masks as numbers, and as a hint.
    if "key_padding_mask" in call:
        mask = call["key_padding_mask"]
        call["key_padding_mask"] = torch.zeros(mask.shape).masked_fill(mask, -torch.inf)
    if "attn_mask" in call:
        call["attn_mask"] = torch.zeros(lengths).masked_fill(call["attn_mask"], -torch.inf)
        assert torch.equal(results(new, tensors, **call)[0], found)
        call["is_causal"] = True
    assert torch.equal(results(new, tensors, **call)[0], found)


def test_one_sequence_without_a_batch():
    old = nn.MultiheadAttention(16, 4)
    new = replaced(old)
    x = torch.randn(5, 16)
    mask = torch.tensor([False] * 4 + [True])
    expected, _ = old(x, x, x, key_padding_mask=mask)
    found, _ = new(x, x, x, key_padding_mask=mask)
    assert found.shape == (5, 16) and relative(found, expected) <= 3e-6
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected, _ = old(x, x, x, attn_mask=causal)
    assert relative(new(x, x, x, attn_mask=causal)[0], expected) <= 3e-6


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_transformer_encoder(norm_first, batch_first):
    layer = nn.TransformerEncoderLayer(
        16, 4, 32, dropout=0.0, norm_first=norm_first, batch_first=batch_first
    )
    can_be_nested = batch_first and not norm_first
    old = nn.TransformerEncoder(layer, 2, enable_nested_tensor=can_be_nested)
    new = replaced(old)
    assert not any(isinstance(m, nn.MultiheadAttention) for m in new.modules())
    x = torch.randn(3, 6, 16)
    padding = torch.arange(6) >= torch.tensor([[6], [2], [5]])
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    real = (~padding)[..., None]
    if not batch_first:
        x, real = x.transpose(0, 1), real.transpose(0, 1)
    calls = (
        {},
        {"src_key_padding_mask": padding},
        {"mask": causal, "is_causal": True},
        {"mask": causal},
        {"mask": causal, "src_key_padding_mask": padding.float().masked_fill(padding, -torch.inf)},
    )
    for call in calls:
        for train in (True, False):  # in eval without gradients the original takes its fused path
            old.train(train), new.train(train)
            with torch.set_grad_enabled(train):
                expected = old(x, **call) * real
                found = new(x, **call) * real
            assert relative(found, expected) <= 3e-6
    old.train(), new.train()
    gradients = []
    # Not a sum of squares, which a layer norm at the end makes a constant.
    grad = torch.randn_like(x) * real
    for model in (old, new):
        leaf = x.clone().requires_grad_()
        model(leaf, mask=causal).backward(grad)
        gradients.append(leaf.grad)
    assert relative(gradients[1], gradients[0]) <= 1e-5


def test_a_whole_transformer():
    old = nn.Transformer(16, 4, 1, 1, 32, dropout=0.0, batch_first=True)
    new = replaced(old)
    source, target = torch.randn(2, 7, 16), torch.randn(2, 5, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    padding = torch.arange(7) >= torch.tensor([[7], [3]])
    call = {
        "tgt_mask": mask,
        "src_key_padding_mask": padding,
        "memory_key_padding_mask": padding,
    }
    assert relative(new(source, target, **call), old(source, target, **call)) <= 3e-6


@pytest.mark.parametrize("kind", OPTIONS)
def test_every_kind_computes_what_its_layer_does(kind):
    old = nn.MultiheadAttention(16, 4, batch_first=True)
    new = replaced(old, kind)
    layer = new.attention
    assert layer.kind == kind
    q, k, v = old.in_proj_weight.chunk(3)
    for child, weight in ((layer.q_proj, q), (layer.k_proj, k), (layer.v_proj, v)):
        assert torch.equal(child.weight, weight)
    assert torch.equal(layer.out_proj.weight, old.out_proj.weight)
    x = torch.randn(2, 9, 16)
    assert torch.equal(new(x, x, x)[0], layer(x))
    padding = torch.arange(9) >= torch.tensor([[9], [4]])
    found = new(x, x, x, key_padding_mask=padding)[0]
    own = layer(x, key_mask=~padding)
    assert relative(found[~padding], own[~padding]) <= 1e-6
    changed = x.masked_fill(padding[..., None], torch.nan)
    again = new(changed, changed, changed, key_padding_mask=padding)[0]
    assert torch.equal(again[~padding], found[~padding])
    causal = torch.ones(9, 9, dtype=torch.bool).triu(1)
    if kind == "linformer":
        with pytest.raises(ValueError, match="causal call of kind 'linformer'"):
            new(x, x, x, attn_mask=causal)
        return
    out = new(x, x, x, attn_mask=causal)[0]
    later = torch.cat([x[:, :5], torch.randn(2, 4, 16)], 1)
    assert relative(new(later, later, later, attn_mask=causal)[0][:, :5], out[:, :5]) <= 1e-6
    assert torch.equal(new(x, x, x)[0], layer(x))  # and full again
    if kind == "longformer":
        assert torch.equal(layer.k_global_proj.weight, k)


def test_what_is_kept():
    old = nn.MultiheadAttention(16, 4, dropout=0.25, dtype=torch.float64)
    old.in_proj_weight.requires_grad_(False)
    new = replaced(old.eval())
    layer = new.attention
    assert layer.dropout == 0.25 and not new.training and not layer.training
    assert layer.q_proj.weight.dtype == torch.float64
    assert not layer.k_proj.weight.requires_grad and layer.out_proj.weight.requires_grad
    assert replaced(old, dropout=0.0).attention.dropout == 0.0
    meta = nn.MultiheadAttention(16, 4, device="meta")
    assert replaced(meta).attention.q_proj.weight.is_meta

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = self.two = nn.MultiheadAttention(16, 4)

    model = replaced(Twice())
    assert model.one is model.two and isinstance(model.one.attention, cosformer.nn.Attention)


def test_what_has_no_counterpart_is_an_error_by_name():
    x = torch.randn(5, 2, 16)
    new = replaced(nn.MultiheadAttention(16, 4))
    with pytest.raises(ValueError, match=r"attn_mask \[5, 5\] is not causal"):
        new(x, x, x, attn_mask=torch.ones(5, 5, dtype=torch.bool).triu(2))
    with pytest.raises(ValueError, match="is not causal"):
        new(x, x, x, attn_mask=torch.randn(5, 5))
    with pytest.raises(ValueError, match="is not causal"):
        bias = torch.full((5, 5), -torch.inf).triu(1)
        bias[3, 0] = 0.5
        new(x, x, x, attn_mask=bias)
    with pytest.raises(ValueError, match="key_padding_mask adds finite numbers"):
        new(x, x, x, key_padding_mask=torch.randn(2, 5))
    for option in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(ValueError, match=f"inner has {option}=True"):
            model = nn.ModuleDict({"inner": nn.MultiheadAttention(16, 4, **{option: True})})
            cosformer.replace_attention(model, kind="softmax")
    dropping = nn.MultiheadAttention(16, 4, dropout=0.1)
    with pytest.raises(ValueError, match="dropout=0.1.*'linear' never forms.*dropout=0.0"):
        cosformer.replace_attention(dropping, kind="linear")
    with pytest.raises(ValueError, match="num_kv_heads is given, expected none"):
        cosformer.replace_attention(dropping, kind="softmax", num_kv_heads=2)
    with pytest.raises(ValueError, match="no nn.MultiheadAttention in a Linear"):
        cosformer.replace_attention(nn.Linear(3, 3), kind="softmax")
    # Nothing is replaced where something cannot be.
    model = nn.ModuleList(
        [nn.MultiheadAttention(16, 4), nn.MultiheadAttention(16, 4, add_zero_attn=True)]
    )
    with pytest.raises(ValueError, match="1 has add_zero_attn"):
        cosformer.replace_attention(model, kind="softmax")
    assert all(isinstance(m, nn.MultiheadAttention) for m in model)


def test_compiles_whole_and_goes_through_copies():
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = replaced(layer, "cosformer")
    x = torch.randn(2, 6, 16)
    torch._dynamo.reset()
    in_graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    call = {"src_mask": mask, "is_causal": True}
    assert torch.equal(in_graph(x, **call), model(x, **call))
    again = replaced(layer, "cosformer")
    again.load_state_dict(copy.deepcopy(model).state_dict())
    assert torch.equal(again(x), model(x))
