"""Attention layers against their formulas: forms, masks, packing, gradients, errors."""

import cosformer
import pytest
import torch
from helpers import relative
from layer_cases import CASES, EMBED, HEADS, KINDS, naive_layer, options_of

NAN = float("nan")


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def test_self_attention_equals_the_formula(case):
    layer, call = case.layer(), case.call()
    x = torch.randn(2, 33, EMBED)
    assert relative(layer(x, **call), naive_layer(layer, x, **call)) <= case.limit


def test_double_precision_equals_the_formula_closely(case):
    layer, call = case.layer(dtype=torch.float64), case.call(torch.float64)
    x = torch.randn(2, 17, EMBED, dtype=torch.float64)
    out = layer(x, **call)
    assert out.dtype == torch.float64
    # Rotary tables are rounded to float32's neighbourhood once.
    assert relative(out, naive_layer(layer, x, **call)) <= 1e-7


def test_behaviour_18_cross_attention_with_starts_equals_the_formula(case):
    shared = case.options.get("share_kv", False)
    layer = case.layer(kdim=16, vdim=16 if shared else 20)
    query, key = torch.randn(2, 9, EMBED), torch.randn(2, 21, 16)
    value = None if shared else torch.randn(2, 21, 20)
    starts = {} if case.kind == "linformer" else {"q_start": 15, "kv_start": 3}
    expected = naive_layer(layer, query, key, value, **starts, **case.call())
    found = layer(query, key, value, **starts, **case.call())
    assert relative(found, expected) <= case.limit
    if starts:
        rows = {"q_start": torch.tensor(15), "kv_start": torch.tensor([3, 3])}
        found = layer(query, key, value, **rows, **case.call())
        assert relative(found, expected) <= case.limit


def test_gradients_equal_the_formulas_and_reach_every_parameter(case):
    layer, call = case.layer(), case.call()
    x = torch.randn(2, 19, EMBED, requires_grad=True)
    for tensor in call.values():
        tensor.requires_grad_()
    leaves = [x, *layer.parameters(), *call.values()]
    out = layer(x, **call)
    grad = torch.randn_like(out)
    found = torch.autograd.grad((out * grad).sum(), leaves)
    expected = torch.autograd.grad((naive_layer(layer, x, **call) * grad).sum(), leaves)
    for a, b in zip(found, expected, strict=True):
        if b.norm() < 1e-5:  # k_proj.bias shifts every softmax score of a row alike
            assert a.norm() <= 1e-4
        else:
            assert relative(a, b) <= case.grad_limit


def test_behaviour_13_padded_batch_equals_each_alone(case):
    layer, call = case.layer(), case.call()
    lengths, longest = [5, 17, 11], 17
    clean = torch.randn(3, longest, EMBED)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    x = clean.masked_fill(~mask[..., None], NAN).requires_grad_()
    out = layer(x, key_mask=mask, **call)
    assert (out[~mask] == 0).all()
    # BigBird's last blocks are those of the padded length when not causal.
    by_length = case.kind == "bigbird" and not case.is_causal
    formula = naive_layer(layer, clean, key_mask=mask, query_mask=mask, **call)
    for row, length in enumerate(lengths):
        part = slice(row, row + 1), slice(0, length)
        alone = formula[part] if by_length else layer(x.detach()[part], **call)
        assert relative(out[part], alone) <= case.limit
    out.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.isfinite().all(), name
    assert (x.grad[~mask] == 0).all()


def test_the_future_changes_no_bit_of_the_past_when_causal(case):
    layer, call = case.layer(), case.call()
    x = torch.randn(1, 40, EMBED)
    changed = torch.cat([x[:, :23], torch.randn(1, 17, EMBED) * 5], 1)
    out, other = layer(x, **call), layer(changed, **call)
    if case.kind == "performer" and case.is_causal:
        assert relative(other[:, :23], out[:, :23]) <= 1e-5
    else:
        assert torch.equal(other[:, :23], out[:, :23]) == case.is_causal
    assert not torch.equal(other[:, 23:], out[:, 23:])


def test_behaviour_15_packed_sequences_equal_each_alone(case):
    layer, call = case.layer(), case.call()
    x = torch.randn(1, 20, EMBED)
    packing = torch.tensor([0, 5, 5, 6, 20], dtype=torch.int32)
    if case.kind == "linformer":
        with pytest.raises(ValueError, match='kind "linformer" takes no packed sequences'):
            layer(x, cu_seqlens_q=packing)
        return
    out = layer(x, cu_seqlens_q=packing, **call)
    for begin, end in ((0, 5), (5, 6), (6, 20)):
        assert relative(out[:, begin:end], layer(x[:, begin:end], **call)) <= case.limit
    with pytest.raises(RuntimeError, match="cu_seqlens"):
        layer(x, cu_seqlens_q=torch.tensor([0, 5, 19], dtype=torch.int32), **call)


def test_behaviour_30_twice_is_identical_and_short_sequences_work(case):
    layer, call = case.layer().eval(), case.call()
    for length in (0, 1, 3, 20):
        x = torch.randn(2, length, EMBED)
        out = layer(x, **call)
        assert out.shape == (2, length, out.shape[2])
        assert torch.equal(out, layer(x, **call))
        if length > 0:
            assert relative(out, naive_layer(layer, x, **call)) <= case.limit


def test_behaviour_44_attention_matrix_times_values_is_the_output(case):
    layer, call = case.layer(), case.call()
    x = torch.randn(2, 13, EMBED)
    weights = layer.attention_matrix(x, **call)
    assert weights.shape == (2, HEADS, 13, 13)
    if case.options.get("normalizer") == "none":
        return
    if case.kind == "longformer" or case.options.get("share_kv"):
        return  # values of two projections, and of one
    v = layer.v_proj(x).view(2, 13, layer.num_kv_heads, -1)
    v = v.repeat_interleave(HEADS // layer.num_kv_heads, 2)
    out = layer._merge_heads(torch.einsum("bhij,bjhd->bihd", weights, v))
    assert relative(out, layer(x, **call)) <= 3e-6
    if case.kind not in ("linformer", "linear", "cosformer"):
        assert relative(weights.sum(-1), torch.ones(2, HEADS, 13)) < 1e-6


def test_rows_without_keys_are_zero():
    for kind in KINDS:
        if kind == "linformer":
            continue
        layer = cosformer.nn.attention(kind, EMBED, HEADS, out_proj=False, **options_of(kind, True))
        query = torch.randn(2, 6, EMBED, requires_grad=True)
        out = layer(query, torch.randn(2, 6, EMBED), kv_start=torch.tensor([3, 9]))
        assert (out[0, :3] == 0).all() and (out[0, 3:] != 0).any() and (out[1] == 0).all()
        out.sum().backward()
        assert query.grad.isfinite().all() and (query.grad[1] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_behaviours_7_and_9_sequences_of_padding_are_zero(kind):
    layer = cosformer.nn.attention(kind, EMBED, HEADS, out_proj=False, **options_of(kind))
    query = torch.randn(2, 12, EMBED, requires_grad=True)
    key = torch.randn(2, 12, EMBED, requires_grad=True)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0] = False
    out = layer(query, key, key_mask=mask)
    assert (out[0] == 0).all() and (out[1] != 0).any()
    out.square().sum().backward()
    for x in (query, key):
        assert x.grad.isfinite().all() and (x.grad[0] == 0).all()
    window = cosformer.nn.SoftmaxAttention(EMBED, HEADS, window=3, out_proj=False)
    mask = torch.ones(1, 24, dtype=torch.bool)
    mask[:, 4:20] = False
    out = window(torch.randn(1, 24, EMBED), key_mask=mask, query_mask=torch.ones_like(mask))
    assert out.isfinite().all() and (out[:, 8:16] == 0).all() and (out[:, 4:7] != 0).any()


def test_defaults_of_the_kinds():
    nn = cosformer.nn
    assert nn.CosformerAttention(16, 2, reweight_len=8).feature_map == "relu"
    assert nn.LinearAttention(16, 2).feature_map == "elu1"
    assert nn.PerformerAttention(16, 2).num_features == 32
    assert nn.BigBirdAttention(16, 2).block_size == 64
    assert nn.LinformerAttention(16, 2, max_len=34).projected_len == 8
    assert nn.LinformerAttention(16, 2, max_len=3).projected_len == 1
    layer = nn.SoftmaxAttention(16, 4, kdim=10, num_kv_heads=2)
    assert (layer.vdim, layer.head_dim, layer.value_dim) == (10, 4, 4)


def names_of(kind, **options):
    layer = cosformer.nn.attention(kind, EMBED, HEADS, **{**options_of(kind), **options})
    parameters = {name for name, _ in layer.named_parameters()}
    return parameters | {f"buffer {name}" for name, _ in layer.named_buffers()}


def test_parameter_names_are_the_contract():
    shared = {f"{p}_proj.{x}" for p in ("q", "k", "v", "out") for x in ("weight", "bias")}
    for kind in ("softmax", "linear", "cosformer", "bigbird"):
        assert names_of(kind) == shared
    assert names_of("performer") == shared | {"buffer projection"}
    assert names_of("performer", trainable_projection=True) == shared | {"projection"}
    of_global = {f"{p}_global_proj.{x}" for p in "qkv" for x in ("weight", "bias")}
    assert names_of("longformer") == shared | of_global
    assert names_of("linformer") == shared | {"key_len_proj", "value_len_proj"}
    one = shared - {"v_proj.weight", "v_proj.bias"} | {"key_len_proj"}
    assert names_of("linformer", share_kv=True) == one
    block = cosformer.nn.Block(cosformer.nn.LinearAttention(8, 2), 20, gated=True)
    assert [name for name, _ in block.named_children()] == [
        *("attention_norm", "attention", "ffn_norm", "ffn"),
    ]
    children = {name for name, _ in block.ffn.named_children()}
    assert children == {"up_proj", "gate_proj", "down_proj"}


def test_behaviour_45_key_padding_mask_is_refused_with_an_explanation():
    x = torch.randn(1, 3, EMBED)
    for kind in KINDS:
        layer = cosformer.nn.attention(kind, EMBED, HEADS, **options_of(kind))
        with pytest.raises(ValueError, match="key_mask=~key_padding_mask"):
            layer(x, key_padding_mask=torch.zeros(1, 3, dtype=torch.bool))


def test_behaviour_46_denominators_on_request():
    layer = cosformer.nn.LinearAttention(EMBED, HEADS, is_causal=True)
    x = torch.randn(2, 9, EMBED, requires_grad=True)
    out, denominator = layer(x, return_denominator=True)
    assert torch.equal(out, layer(x))
    assert denominator.shape == (2, 9, HEADS) and not denominator.requires_grad
    assert (denominator > 0).all()
    out, state, denominator = layer(x, return_state=True, return_denominator=True)
    assert (state.position == 9).all() and denominator.shape == (2, 9, HEADS)
    none = cosformer.nn.LinearAttention(EMBED, HEADS, normalizer="none")
    assert none(x, return_denominator=True)[1] is None


@pytest.mark.parametrize("kind", ["softmax", "linformer", "longformer", "bigbird"])
def test_dropout_only_in_training_mode_and_from_torchs_generator(kind):
    layer = cosformer.nn.attention(kind, EMBED, HEADS, dropout=0.4, **options_of(kind))
    plain = cosformer.nn.attention(kind, EMBED, HEADS, **options_of(kind))
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 23, EMBED)

    def seeded(seed):
        torch.manual_seed(seed)
        return layer(x)

    assert torch.equal(seeded(4), seeded(4))
    assert not torch.equal(seeded(4), seeded(5))
    with torch.no_grad():
        mean = sum(layer(x) for _ in range(200)) / 200
    assert relative(mean, plain(x)) <= 0.15
    layer.eval()
    torch.manual_seed(6)
    following = torch.rand(2)
    torch.manual_seed(6)
    assert torch.equal(layer(x), plain(x))
    assert torch.equal(torch.rand(2), following)


def test_behaviour_30_projections_come_from_their_seed_alone():
    def layer(seed):
        return cosformer.nn.PerformerAttention(EMBED, HEADS, projection_seed=seed)

    torch.manual_seed(1)
    one = layer(7)
    torch.manual_seed(2)
    assert torch.equal(one.projection, layer(7).projection)
    expected = cosformer.performer_projection(24, 6, seed=7)
    assert torch.equal(one.projection, expected) and not one.projection.requires_grad
    assert not torch.equal(one.projection, layer(8).projection)
    x = torch.randn(1, 9, EMBED)
    before, buffer = one(x), one.projection
    one.redraw_projection(99)
    assert one.projection is buffer and not torch.equal(one(x), before)
    one.redraw_projection(7)
    assert torch.equal(one(x), before)


def test_behaviour_19_linformer_uses_the_first_rows():
    layer = cosformer.nn.LinformerAttention(EMBED, HEADS, max_len=48, projected_len=10)
    x = torch.randn(2, 31, EMBED)
    before = layer(x)
    with torch.no_grad():
        layer.key_len_proj[31:] = 7
        layer.value_len_proj[31:] = 7
    assert torch.equal(layer(x), before)
    with pytest.raises(RuntimeError, match="49.*48"):
        layer(torch.randn(2, 49, EMBED))
    with pytest.raises(ValueError, match="no causal form"):
        cosformer.nn.LinformerAttention(EMBED, HEADS, max_len=48, is_causal=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_longformer_global_mask_and_first_tokens_together(is_causal):
    layer = cosformer.nn.LongformerAttention(
        EMBED, HEADS, window=3, global_tokens=2, is_causal=is_causal
    )
    x = torch.randn(2, 40, EMBED)
    mask = torch.zeros(2, 40, dtype=torch.bool)
    mask[0, 17] = mask[1, 30] = mask[1, 0] = True  # the last a first token too: counts once
    out = layer(x, global_mask=mask)
    assert relative(out, naive_layer(layer, x, global_mask=mask)) <= 3e-6
    assert not torch.equal(out, layer(x))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [1, 7, 64, 1000])
def test_behaviour_20_any_length_against_any_window(is_causal, window):
    for length in (1, 2, 8, 65):
        layer = cosformer.nn.LongformerAttention(
            EMBED, HEADS, window=window, global_tokens=2, is_causal=is_causal
        )
        x = torch.randn(1, length, EMBED)
        assert relative(layer(x), naive_layer(layer, x)) <= 3e-6


@pytest.mark.parametrize("is_causal", [False, True])
def test_behaviour_21_random_blocks_reach_far_and_are_seeded(is_causal):
    layer = cosformer.nn.BigBirdAttention(32, 2, is_causal=is_causal)
    mask = layer.block_mask(64)  # 4,096 tokens in blocks of 64
    assert mask.shape == (2, 64, 64) and not torch.equal(mask[0], mask[1])
    near = (torch.arange(64)[:, None] - torch.arange(64)).abs() <= 1
    random = (mask & ~near)[:, 1:63, 17:63]  # beyond the window, global blocks, 1,024 tokens
    assert random.sum() > 60
    again = cosformer.nn.BigBirdAttention(32, 2, is_causal=is_causal)
    other = cosformer.nn.BigBirdAttention(32, 2, is_causal=is_causal, block_seed=1)
    assert torch.equal(again.block_mask(64), mask) and not torch.equal(other.block_mask(64), mask)
    if is_causal:
        assert torch.equal(layer.block_mask(20), mask[:, :20, :20])
    x = torch.randn(1, 1000, 32)
    assert relative(layer(x), naive_layer(layer, x)) <= 3e-6


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "relu", "silu"])
@pytest.mark.parametrize("gated", [False, True])
def test_feed_forward(name, gated):
    ffn = cosformer.nn.FeedForward(8, 20, activation=name, gated=gated, bias=not gated).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64)

    def activated(y):
        if name == "relu":
            return y.clamp_min(0)
        if name == "silu":
            return y / (1 + (-y).exp())
        if name == "gelu":
            return y * 0.5 * (1 + torch.erf(y / 2**0.5))
        return y * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3)))

    up = ffn.up_proj(x)
    hidden = activated(ffn.gate_proj(x)) * up if gated else activated(up)
    assert relative(ffn(x), ffn.down_proj(hidden)) <= 1e-12
    assert len(list(ffn.parameters())) == (3 if gated else 4)


def test_norms():
    x = (torch.randn(2, 5, 12) * 3 + 1).double()
    layer = cosformer.nn.Norm("layernorm", 12).double()
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    centred = x - x.mean(-1, keepdim=True)
    unit = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert relative(layer(x), unit * layer.weight + layer.bias) <= 1e-12
    assert cosformer.nn.Norm("layernorm", 12, bias=False).bias is None
    rms = cosformer.nn.Norm("rmsnorm", 12, eps=1e-6).double()
    torch.nn.init.normal_(rms.weight)
    unit = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert rms.bias is None and relative(rms(x), unit * rms.weight) <= 1e-12
    with pytest.raises(ValueError, match='found "batchnorm"'):
        cosformer.nn.Norm("batchnorm", 4)


def test_block_places_its_norms_and_drops_only_while_training():
    x = torch.randn(2, 7, 16)

    def make(**options):
        attention = cosformer.nn.CosformerAttention(16, 2, reweight_len=32, is_causal=True)
        return cosformer.nn.Block(attention, 40, **options)

    pre = make()
    y = x + pre.attention(pre.attention_norm(x))
    assert torch.equal(pre(x), y + pre.ffn(pre.ffn_norm(y)))
    post = make(pre_norm=False)
    y = post.attention_norm(x + post.attention(x))
    assert torch.equal(post(x), post.ffn_norm(y + post.ffn(y)))
    for block in (pre, post):
        seen = block.attention_norm(x) if block.pre_norm else x
        expected = block.attention.attention_matrix(seen)
        assert torch.equal(block.attention_matrix(x), expected)
        out, state = block(x[:, :6], return_state=True)
        step, state = block.decode_step(x[:, 6:], state)
        assert relative(torch.cat([out, step], 1), block(x)) <= 3e-6
    drops = make(dropout=0.5)
    assert not torch.equal(drops(x), drops(x))
    drops.eval()
    assert torch.equal(drops(x), drops(x))


ERRORS = {
    "kind": (lambda nn: nn.attention("softmix", 8, 2), 'kind is "softmix", expected "softmax"'),
    "heads": (lambda nn: nn.SoftmaxAttention(8, 3), "embed_dim is 8, expected a multiple"),
    "kv_heads": (
        lambda nn: nn.SoftmaxAttention(8, 4, num_kv_heads=3),
        r"num_heads is 4, expected a multiple of num_kv_heads \(3\)",
    ),
    "reweight_len": (
        lambda nn: nn.CosformerAttention(8, 2, reweight_len=0),
        "reweight_len is 0, expected M > 0",
    ),
    "normalizer": (lambda nn: nn.LinearAttention(8, 2, normalizer="l2"), 'normalizer is "l2"'),
    "dropout": (lambda nn: nn.SoftmaxAttention(8, 2, dropout=1.0), "dropout is 1.0"),
    "dropout of a linear kind": (
        lambda nn: nn.LinearAttention(8, 2, dropout=0.1),
        "dropout belongs to kinds that form each weight .* never forms the weights",
    ),
    "an option of another kind": (
        lambda nn: nn.attention("performer", 8, 2, window=3),
        'window belongs to kind "softmax" and "longformer", found with kind "performer"',
    ),
    "dilation": (lambda nn: nn.SoftmaxAttention(8, 2, dilation=2), "dilation is 2 without"),
    "window": (lambda nn: nn.LongformerAttention(8, 2, window=0), "window is 0, expected at least"),
    "window_blocks": (
        lambda nn: nn.BigBirdAttention(8, 2, window_blocks=2),
        "window_blocks is 2, expected an odd number",
    ),
    "rotary_dim": (
        lambda nn: nn.SoftmaxAttention(8, 2, rotary_base=10.0, rotary_dim=3),
        "rotary_dim is 3, expected an even number",
    ),
    "rotary_dim of a linear kind": (
        lambda nn: nn.LinearAttention(8, 2, rotary_base=10.0, rotary_dim=2),
        "rotates whole heads",
    ),
    "rotary_base": (lambda nn: nn.SoftmaxAttention(8, 2, rotary_base=-1.0), "rotary_base is -1.0"),
    "rotary Linformer": (
        lambda nn: nn.LinformerAttention(8, 2, max_len=9, rotary_base=10.0),
        "no rotary positions",
    ),
    "projected_len": (
        lambda nn: nn.LinformerAttention(8, 2, max_len=9, projected_len=10),
        "projected_len is 10, expected 1 to max_len",
    ),
    "max_len": (lambda nn: nn.LinformerAttention(8, 2, max_len=0), "max_len is 0, expected"),
    "one_kv_head": (
        lambda nn: nn.LinformerAttention(8, 2, max_len=9, one_kv_head=True, num_kv_heads=2),
        "one_kv_head with num_kv_heads 2",
    ),
    "share_kv": (
        lambda nn: nn.LinformerAttention(8, 2, max_len=9, share_kv=True, value_dim=2),
        "share_kv makes keys and values one",
    ),
    "activation": (lambda nn: nn.FeedForward(8, 8, activation="mish"), 'activation is "mish"'),
    "the base": (lambda nn: nn.SoftmaxAttention(0, 2), "embed_dim is 0, expected a positive"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_options(name):
    make, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        make(cosformer.nn)


def test_unknown_options_name_the_nearest():
    with pytest.raises(TypeError, match="unknown option 'windw', did you mean 'window'"):
        cosformer.nn.attention("linear", 8, 2, windw=3)
    with pytest.raises(NotImplementedError, match="base of layers"):
        cosformer.nn.Attention(8, 2)
    # What stands at its default asks for nothing.
    cosformer.nn.attention("linear", 8, 2, dropout=0.0, window=None)


CALLS = {
    "query": ("linear", (2, 3, 7), {}, r"query is \[2, 3, 7\], expected \[batch, seq, 24\]"),
    "key_mask dtype": ("linear", (2, 3, 24), {"key_mask": torch.ones(2, 3)}, "expected torch.bool"),
    "behaviour 14": (
        "linear",
        (2, 3, 24),
        {"key_mask": torch.ones(2, 4, dtype=torch.bool)},
        r"key_mask is \[2, 4\], expected \[2, 3\]",
    ),
    "packing and masks": (
        "softmax",
        (1, 3, 24),
        {
            "key_mask": torch.ones(1, 3, dtype=torch.bool),
            "cu_seqlens_q": torch.tensor([0, 3]),
        },
        "masks and cu_seqlens together",
    ),
    "cu_seqlens_k": ("softmax", (1, 3, 24), {"cu_seqlens_k": torch.tensor([0, 3])}, "without"),
    "q_start": ("linear", (2, 3, 24), {"q_start": torch.tensor([1, 2, 3])}, r"q_start is .*\[2\]"),
    "relative_bias": (
        "linear",
        (2, 3, 24),
        {"relative_bias": torch.ones(4, 3)},
        "takes no relative_bias: it never forms the scores",
    ),
    "relative_bias of Linformer": (
        "linformer",
        (2, 3, 24),
        {"relative_bias": torch.ones(4, 3)},
        "a projected key has no position",
    ),
    "global_mask": (
        "softmax",
        (2, 3, 24),
        {"global_mask": torch.ones(2, 3, dtype=torch.bool)},
        'takes no global_mask: global tokens belong to kind "longformer"',
    ),
    "denominators": ("softmax", (2, 3, 24), {"return_denominator": True}, "has no denominators"),
    "state of Linformer": ("linformer", (2, 3, 24), {"return_state": True}, "has no state"),
    "starts of Linformer": ("linformer", (2, 3, 24), {"q_start": 1}, "takes no q_start"),
    "state of BigBird": ("bigbird", (2, 3, 24), {"return_state": True}, "only when causal"),
}


@pytest.mark.parametrize("name", CALLS)
def test_errors_of_calls(name):
    kind, shape, call, message = CALLS[name]
    layer = cosformer.nn.attention(kind, EMBED, HEADS, **options_of(kind))
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(shape), **call)


def test_errors_that_need_a_layer():
    x = torch.randn(2, 3, EMBED)
    layer = cosformer.nn.LinearAttention(EMBED, HEADS)
    with pytest.raises(ValueError, match="must agree"):
        layer(x, torch.randn(3, 3, EMBED))
    with pytest.raises(ValueError, match="decode_step needs is_causal"):
        layer.decode_step(x[:, :1])
    with pytest.raises(ValueError, match=r"query is \[2, 3, 24\], expected \[batch, 1, 24\]"):
        cosformer.nn.LinearAttention(EMBED, HEADS, is_causal=True).decode_step(x)
    shared = cosformer.nn.LinformerAttention(EMBED, HEADS, max_len=9, share_kv=True)
    with pytest.raises(ValueError, match="found a value beside the key"):
        shared(x, x, torch.randn(2, 3, EMBED))
    with pytest.raises(ValueError, match="10 tokens, max_len is 9"):
        shared.attention_matrix(torch.randn(1, 10, EMBED))
    window = cosformer.nn.SoftmaxAttention(EMBED, HEADS, window=2)
    with pytest.raises(ValueError, match="a window keeps a state only when causal"):
        window(x, return_state=True)
