"""cosformer.register_transformers: unmodified models of transformers with our attention."""

import copy

import cosformer
import pytest
import torch
import transformers
from cosformer.integrations import transformers as integration
from helpers import relative

LINEAR = ["cosformer", "cosformer_relu", "cosformer_linear", "cosformer_performer"]
EVERY = ["cosformer_softmax", *LINEAR]
SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "bert": transformers.BertConfig(
        **SIZES,
        intermediate_size=48,
        max_position_embeddings=40,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ),
    "llama": transformers.LlamaConfig(
        **SIZES, intermediate_size=48, max_position_embeddings=40, num_key_value_heads=2
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=50,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=40,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "mistral": transformers.MistralConfig(
        **SIZES,
        intermediate_size=48,
        max_position_embeddings=40,
        num_key_value_heads=2,
        sliding_window=4,
    ),
}
CAUSAL = ["llama", "gpt2"]
# With a cache, even an empty one, transformers does not look for packed sequences.
NO_CACHE = {name: {} if name == "bert" else {"use_cache": False} for name in CONFIGS}


@pytest.fixture(autouse=True)
def _registered():
    cosformer.register_transformers()


def model(family, attention, std=0.3, **changes):
    """The same weights whatever the attention, by default large enough for it to matter."""
    config = copy.deepcopy(CONFIGS[family])
    config.update(changes)
    kind = transformers.AutoModelForMaskedLM if family == "bert" else None
    kind = kind or transformers.AutoModelForCausalLM
    torch.manual_seed(1)
    made = kind.from_config(config, attn_implementation=attention, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.ndim == 2 and "embed" not in name and "wte" not in name:
                weight.normal_(std=std)
    return made.eval()


def padded(length=9, keep=(9, 6), left=False):
    """(ids, mask, position_ids): the padding's ids are random: they must not matter."""
    ids = torch.randint(1, 50, (len(keep), length))
    mask = torch.zeros_like(ids)
    for row, count in enumerate(keep):
        mask[row, length - count :] = 1 if left else 0
        mask[row, :count] = mask[row, :count] if left else 1
    return ids, mask, (mask.cumsum(-1) - 1).clamp_min(0)


def logits(made, ids, mask=None, **kwargs):
    return made(
        input_ids=ids, attention_mask=mask, **NO_CACHE[made.config.model_type], **kwargs
    ).logits


def test_names():
    assert cosformer.register_transformers() == sorted(EVERY, key=list(integration.NAMES).index)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("family", ["bert", "llama", "gpt2", "mistral"])
@pytest.mark.parametrize("their", ["eager", "sdpa"])
def test_softmax_equals_the_models_own(family, their, left):
    """Logits at real tokens and the gradients of a loss over these."""
    ids, mask, positions = padded(left=left)
    found = []
    for attention in (their, "cosformer_softmax"):
        made = model(family, attention)
        out = logits(made, ids, mask, position_ids=positions)[mask.bool()]
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        found.append((out, {name: p.grad for name, p in made.named_parameters()}))
    (expected, expected_grads), (out, grads) = found
    assert relative(out, expected) < 1e-5
    for name, grad in grads.items():
        if expected_grads[name] is not None:
            scale = expected_grads[name].norm()
            assert (grad - expected_grads[name]).norm() <= 2e-5 * scale + 1e-4, name


def test_softmax_without_padding_and_packed():
    """position_ids that restart without a mask are packed sequences, in every row."""
    ids = torch.randint(1, 50, (2, 9))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 0, 0, 1, 2]])
    for family in ("llama", "mistral"):
        own = model(family, "sdpa")
        ours = model(family, "cosformer_softmax")
        assert relative(logits(ours, ids), logits(own, ids)) < 1e-5
        packed = logits(ours, ids, position_ids=positions)
        assert relative(packed, logits(own, ids, position_ids=positions)) < 1e-5
        assert relative(packed, logits(ours, ids)) > 1e-2


@pytest.mark.parametrize("attention", LINEAR)
def test_packed_equals_each_alone(attention):
    ids = torch.randint(1, 50, (1, 9))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]])
    made = model("llama", attention)
    packed = logits(made, ids, position_ids=positions)
    alone = torch.cat([logits(made, ids[:, :3]), logits(made, ids[:, 3:])], 1)
    assert relative(packed, alone) < 1e-5


@pytest.mark.parametrize("attention", EVERY)
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("family", ["bert", "llama", "gpt2"])
def test_padding_does_not_matter(family, attention, left):
    """Each row equals its sequence alone, and what the padding holds changes no bit."""
    ids, mask, positions = padded(left=left)
    made = model(family, attention)
    out = logits(made, ids, mask, position_ids=positions)
    for row, real in enumerate(mask.bool()):
        assert relative(out[row, real], logits(made, ids[row : row + 1, real])[0]) < 1e-5
    other = torch.where(mask.bool(), ids, torch.randint(1, 50, ids.shape))
    changed = logits(made, other, mask, position_ids=positions)
    assert torch.equal(out[mask.bool()], changed[mask.bool()])


@pytest.mark.parametrize("attention", EVERY)
def test_a_mask_of_ones_is_no_mask(attention):
    ids = torch.randint(1, 50, (2, 7))
    made = model("bert", attention)
    assert torch.equal(logits(made, ids), logits(made, ids, torch.ones_like(ids)))


@pytest.mark.parametrize("attention", EVERY)
@pytest.mark.parametrize("family", CAUSAL)
def test_causality(family, attention):
    ids = torch.randint(1, 50, (2, 9))
    later = ids.clone()
    later[:, 5:] = torch.randint(1, 50, (2, 4))
    made = model(family, attention)
    before, after = logits(made, ids), logits(made, later)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=1e-5, atol=1e-5)
    assert relative(before[:, 5:], after[:, 5:]) > 1e-2
    both_ways = model("bert", attention)
    assert relative(logits(both_ways, ids)[:, :5], logits(both_ways, later)[:, :5]) > 1e-3


@pytest.mark.parametrize("attention", LINEAR)
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_trains(family, attention):
    """A linear kind differs from softmax, and every parameter that softmax trains has gradients."""
    ids, mask, _ = padded()
    made = model(family, attention).train()
    logits(made, ids, mask)[mask.bool()].square().sum().backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    queries = [p.grad for name, p in made.named_parameters() if "query" in name or "c_attn" in name]
    assert all(grad.abs().sum() > 0 for grad in queries)
    assert (
        relative(logits(made.eval(), ids), logits(model(family, "cosformer_softmax"), ids)) > 1e-2
    )


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("attention", EVERY)
@pytest.mark.parametrize("family", CAUSAL)
def test_generate_with_a_cache_equals_without(family, attention, cache):
    """Greedy tokens and their scores, for a batch padded on the left."""
    ids, mask, _ = padded(length=7, keep=(7, 4), left=True)
    made = model(family, attention)
    options = {
        "attention_mask": mask,
        "max_new_tokens": 6,
        "min_new_tokens": 6,
        "do_sample": False,
        "pad_token_id": 0,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    whole = made.generate(ids, use_cache=False, **options)
    kind = {"cache_implementation": cache, "disable_compile": True} if cache == "static" else {}
    cached = made.generate(ids, use_cache=True, **kind, **options)
    assert torch.equal(cached.sequences, whole.sequences)
    assert relative(torch.stack(cached.logits), torch.stack(whole.logits)) < 2e-5


@pytest.mark.parametrize("attention", EVERY)
def test_chunks_over_a_cache_and_beam_search(attention):
    ids = torch.randint(1, 50, (2, 9))
    made = model("llama", attention)
    whole = logits(made, ids)
    caches = transformers.DynamicCache, transformers.StaticCache
    for cache in (caches[0](), caches[1](config=made.config, max_cache_len=16)):
        parts = [made(input_ids=part, cache=cache).logits for part in ids.split([4, 3, 2], 1)]
        assert relative(torch.cat(parts, 1), whole) < 1e-5
    options = {"num_beams": 3, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    whole = made.generate(ids, use_cache=False, **options)
    assert torch.equal(made.generate(ids, **options), whole)


def test_a_sliding_window_over_its_cache():
    """Past the window the cache drops keys; softmax follows, a linear kind has no window."""
    ids = torch.randint(1, 50, (2, 9))
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    own = model("mistral", "sdpa").generate(ids, **options)
    for cache in ({}, {"cache_implementation": "static", "disable_compile": True}):
        ours = model("mistral", "cosformer_softmax").generate(ids, **cache, **options)
        assert torch.equal(ours, own)
    for attention in LINEAR:
        with pytest.raises(ValueError, match=r"sliding window, \(3, -1\).* its 9 keys"):
            logits(model("mistral", attention), ids)
        assert logits(model("mistral", attention), ids[:, :4]).isfinite().all()
        wide = model("mistral", attention, sliding_window=None)
        assert (
            relative(logits(wide, ids[:, :4]), logits(model("mistral", attention), ids[:, :4]))
            < 1e-6
        )


def test_reweight_len_comes_from_the_config_or_the_registration():
    ids = torch.randint(1, 50, (1, 9))
    by_config = logits(model("gpt2", "cosformer"), ids)
    cosformer.register_transformers(reweight_len=40)
    assert torch.equal(logits(model("gpt2", "cosformer"), ids), by_config)
    cosformer.register_transformers(reweight_len=20)
    assert relative(logits(model("gpt2", "cosformer"), ids), by_config) > 1e-4
    cosformer.register_transformers(reweight_len=5)
    with pytest.raises(RuntimeError, match="reweight_len"):
        logits(model("gpt2", "cosformer"), ids)
    cosformer.register_transformers()
    made = model("gpt2", "cosformer")
    for layer in made.transformer.h:
        layer.attn.config = transformers.PreTrainedConfig(attn_implementation="cosformer")
    with pytest.raises(ValueError, match="max_position_embeddings of PreTrainedConfig is None"):
        logits(made, ids)


def test_performers_projection_is_seeded_and_nears_softmax():
    ids = torch.randint(1, 50, (1, 9))
    exact = logits(model("llama", "cosformer_softmax", std=0.1), ids)
    distances = {}
    for features in (8, 4096):
        cosformer.register_transformers(num_features=features, seed=3)
        out = logits(model("llama", "cosformer_performer", std=0.1), ids)
        cosformer.register_transformers(num_features=features, seed=3)
        assert torch.equal(logits(model("llama", "cosformer_performer", std=0.1), ids), out)
        cosformer.register_transformers(num_features=features, seed=4)
        assert not torch.equal(logits(model("llama", "cosformer_performer", std=0.1), ids), out)
        distances[features] = relative(out, exact)
    assert distances[4096] < 0.2 < distances[8]


def test_performer_takes_the_models_scale():
    """GPT-2 may leave scores unscaled; Performer's features stand for scaled ones."""
    ids = torch.randint(1, 50, (1, 9))
    cosformer.register_transformers(num_features=8192)
    unscaled = {"scale_attn_weights": False}
    near, scaled = (
        relative(
            logits(model("gpt2", "cosformer_performer", std=0.1, **change), ids),
            logits(model("gpt2", "cosformer_softmax", std=0.1, **unscaled), ids),
        )
        for change in (unscaled, {})
    )
    assert near < scaled / 2


def test_dropout():
    """Softmax drops weights by torch's seed; a linear kind, which has none, refuses."""
    ids = torch.randint(1, 50, (2, 9))
    dropout = {"attention_probs_dropout_prob": 0.5}
    made = model("bert", "cosformer_softmax", **dropout)
    still = logits(made, ids)
    assert torch.equal(still, logits(made, ids))
    made.train()
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(logits(made, ids))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2]) and not torch.equal(runs[0], still)
    for attention in LINEAR:
        made = model("bert", attention, **dropout)
        assert logits(made, ids).isfinite().all()
        with pytest.raises(ValueError, match=f"{attention}: dropout .* is 0.5, expected 0"):
            logits(made.train(), ids)


def test_cross_attention():
    """Of kinds without positions it works; the cosine needs what transformers does not tell."""
    ids, mask, _ = padded()
    memory = torch.randn(2, 5, 32)
    memory_mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    given = {"encoder_hidden_states": memory, "encoder_attention_mask": memory_mask}
    change = {"add_cross_attention": True}
    own, ours = (
        logits(model("gpt2", kind, **change), ids, mask, **given)[mask.bool()]
        for kind in ("sdpa", "cosformer_softmax")
    )
    assert relative(ours, own) < 1e-5
    linear = model("gpt2", "cosformer_linear", **change)
    out = logits(linear, ids, mask, **given)[mask.bool()]
    given["encoder_hidden_states"] = memory.masked_fill(memory_mask[..., None] == 0, 7.0)
    assert torch.equal(logits(linear, ids, mask, **given)[mask.bool()], out)
    with pytest.raises(ValueError, match="cosformer: cross attention of 9 queries to 5 keys"):
        logits(model("gpt2", "cosformer", **change), ids, mask, **given)


@pytest.mark.parametrize("attention", EVERY)
def test_bfloat16(attention):
    ids, mask, _ = padded()
    made = model("llama", attention)
    exact = logits(made, ids, mask)[mask.bool()]
    half = logits(made.to(torch.bfloat16), ids, mask)[mask.bool()]
    assert half.dtype == torch.bfloat16 and relative(half, exact) < 0.1


def test_masks_that_cannot_be_honoured_are_errors():
    ids = torch.randint(1, 50, (1, 6))
    made = model("llama", "cosformer")
    square = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=r"\[1, 1, 6, 6\] torch.bool, a mask of the caller's own"):
        logits(made, ids, square)
    chunked = transformers.masking_utils.create_chunked_causal_mask
    config = copy.deepcopy(made.config)
    config.attention_chunk_size = 2
    with pytest.raises(ValueError, match="masks its attention by chunked_overlay"):
        chunked(config, torch.empty(1, 6, 0), None, None)
    t5 = transformers.T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4
    )
    made = transformers.T5EncoderModel._from_config(t5, attn_implementation="cosformer_softmax")
    with pytest.raises(ValueError, match="gives position_bias"):
        made(ids)


def test_output_attentions_says_that_there_are_none():
    ids = torch.randint(1, 50, (1, 6))
    layer = model("bert", "cosformer").bert.encoder.layer[0].attention.self
    with pytest.warns(UserWarning, match="output_attentions=True has no effect"):
        layer(torch.randn(1, 6, 32), output_attentions=True)
    assert ids.shape == (1, 6)


def test_bad_options():
    for name in ("reweight_len", "num_features"):
        with pytest.raises(ValueError, match=f"{name} is 0, expected at least 1"):
            cosformer.register_transformers(**{name: 0})


def test_switching_a_model_that_exists():
    ids = torch.randint(1, 50, (1, 6))
    made = model("llama", "sdpa")
    own = logits(made, ids)
    made.set_attn_implementation("cosformer_softmax")
    assert relative(logits(made, ids), own) < 1e-5
    made.set_attn_implementation("cosformer")
    assert torch.equal(logits(made, ids), logits(model("llama", "cosformer"), ids))
