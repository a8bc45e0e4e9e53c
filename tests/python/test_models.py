"""The Transformer: heads, masks, states, and what PyTorch does with any module."""

import copy
import pickle

import cosformer
import pytest
import torch
from cosformer.models import AttentionConfig, ModelConfig, ModelState, Transformer
from helpers import relative
from model_helpers import ALL, CAUSAL, small_config


def model_of(config, dtype=torch.float32):
    return Transformer(config).to(dtype).eval()


def ids_of(config, batch=2, count=20):
    return torch.randint(config.vocab_size, (batch, count))


# Not causal, BigBird's last blocks belong to the length of the call, padding included.
PADDED = [name for name in ALL if not ("encoder" in name and "bigbird" in str(ALL[name].attention))]


@pytest.mark.parametrize("name", PADDED)
def test_behaviour_13_padded_batch_equals_each_alone(name):
    config = ALL[name]
    model = model_of(config, torch.float64)
    ids = ids_of(config, 3)
    lengths = [20, 13, 1]
    mask = torch.arange(20) < torch.tensor(lengths)[:, None]
    logits = model(ids, key_mask=mask)
    other = torch.where(mask, ids, (ids + 3) % config.vocab_size)
    assert torch.equal(model(other, key_mask=mask)[mask], logits[mask])
    for row, count in enumerate(lengths):
        alone = model(ids[row : row + 1, :count])
        assert relative(logits[row : row + 1, :count], alone) < 1e-12


@pytest.mark.parametrize("name", CAUSAL)
def test_behaviour_23_every_split_equals_the_parallel_forward(name):
    config = CAUSAL[name]
    model = model_of(config, torch.float64)
    ids = ids_of(config)
    whole = model(ids)
    # Prefill of 7, a chunk of 5, the rest token by token, out of and in place.
    first, state = model(ids[:, :7], return_state=True)
    second, state = model(ids[:, 7:12], state=state, return_state=True)
    parts = [first, second]
    for at in range(12, 16):
        part, state = model(ids[:, at : at + 1], state=state, return_state=True)
        parts.append(part)
    for at in range(16, 20):
        part, state = model.decode_step(ids[:, at : at + 1], state)
        parts.append(part)
    assert relative(torch.cat(parts, 1), whole) < 1e-12
    assert state.position.tolist() == [20, 20]


@pytest.mark.parametrize("name", CAUSAL)
def test_rows_of_a_state_stand_at_different_positions(name):
    config = CAUSAL[name]
    model = model_of(config, torch.float64)
    ids = ids_of(config, 3)
    lengths = torch.tensor([9, 1, 14])
    mask = torch.arange(14) < lengths[:, None]
    _, state = model(ids[:, :14], key_mask=mask, return_state=True)
    assert state.position.tolist() == lengths.tolist()
    following = torch.randint(config.vocab_size, (3, 3))
    order = torch.tensor([2, 0, 1, 2])
    state = state.clone().select(order)
    parts = []
    for at in range(3):
        logits, state = model.decode_step(following[order][:, at : at + 1], state)
        parts.append(logits)
    found = torch.cat(parts, 1)
    for place, row in enumerate(order.tolist()):
        text = torch.cat([ids[row, : lengths[row]], following[row]])[None]
        assert relative(found[place : place + 1], model(text)[:, -3:]) < 1e-12


def test_gradients_flow_through_the_state():
    model = model_of(small_config("linear"), torch.float64)
    ids = ids_of(model.config)
    model(ids).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    first, state = model(ids[:, :8], return_state=True)
    second, _ = model(ids[:, 8:], state=state, return_state=True)
    (first.square().sum() + second.square().sum()).backward()
    for name, parameter in model.named_parameters():
        assert relative(parameter.grad, expected[name]) < 1e-10, name


def test_an_older_state_stays_as_it_was():
    model = model_of(small_config(["softmax", "cosformer"]))
    ids = ids_of(model.config)
    _, state = model(ids[:, :10], return_state=True)
    before = state.clone()
    once, _ = model(ids[:, 10:12], state=state, return_state=True)
    again, _ = model(ids[:, 10:12], state=state, return_state=True)
    copy_of, _ = model(ids[:, 10:12], state=before, return_state=True)
    assert torch.equal(once, again) and torch.equal(once, copy_of)
    moved = state.to(torch.float64)
    assert isinstance(moved, ModelState) and moved.layers[0].keys.dtype == torch.float64
    assert not any(t.requires_grad for t in state.detach().layers[1] if torch.is_tensor(t))


def test_activation_checkpointing_gives_the_same_gradients():
    config = small_config(["softmax", "cosformer"], position="none", dropout=0.2)
    model = Transformer(config).train()
    ids = ids_of(config)

    def gradients():
        torch.manual_seed(3)  # the same dropout
        model.zero_grad()
        model(ids, key_mask=torch.arange(20).expand(2, 20) < 15).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    model.set_activation_checkpointing(True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.numel()) or t, lambda t: t
    ):
        loss = model(ids).sum()
    kept = sum(saved)
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))
    model.set_activation_checkpointing(False)
    saved.clear()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.numel()) or t, lambda t: t
    ):
        loss = model(ids).sum()
    assert kept < sum(saved) / 2 and loss.requires_grad


def test_dropout_is_for_training_alone():
    model = Transformer(small_config("linear", dropout=0.5))
    ids = ids_of(model.config)
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


def test_parameters_begin_as_the_config_says():
    config = small_config(["linear", "performer"], init_std=0.05, embed_dim=64, vocab_size=200)
    model = Transformer(config)
    assert model.embed.weight.std().item() == pytest.approx(0.05, rel=0.05)
    assert model.layers[0].attention.q_proj.weight.std().item() == pytest.approx(0.05, rel=0.1)
    assert not model.layers[0].attention.q_proj.bias.any()
    assert torch.equal(model.final_norm.weight, torch.ones(64))
    # Of the seed, and another in each layer.
    projection = model.layers[1].attention.projection
    drawn = cosformer.performer_projection(*projection.shape, seed=1)
    assert torch.equal(projection, drawn)
    torch.manual_seed(5)
    one = Transformer(config)
    torch.manual_seed(5)
    two = Transformer(config)
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b), name
    linformer = Transformer(small_config("linformer", is_causal=False, max_len=256))
    assert linformer.layers[0].attention.key_len_proj.std().item() == pytest.approx(1 / 8, rel=0.1)


def test_max_positions():
    assert Transformer(small_config("linear")).max_positions == 32
    assert Transformer(small_config("linear", position="none")).max_positions is None
    cosine = small_config(AttentionConfig(reweight_len=40), position="rope")
    assert Transformer(cosine).max_positions == 41
    linformer = small_config("linformer", is_causal=False, position="none")
    assert Transformer(linformer).max_positions == 32


def test_too_long_is_an_error_that_names_both_numbers():
    model = model_of(small_config("linear"))
    with pytest.raises(
        ValueError, match=r"has 33 tokens, the model knows 32 positions \(max_len\)"
    ):
        model(torch.zeros(1, 33, dtype=torch.int64))
    _, state = model(torch.zeros(2, 32, dtype=torch.int64), return_state=True)
    with pytest.raises(ValueError, match="has 33 tokens"):
        model.decode_step(torch.zeros(2, 1, dtype=torch.int64), state)


def test_wrong_inputs_are_named():
    model = model_of(small_config())
    with pytest.raises(ValueError, match="ids are torch.float32"):
        model(torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"ids are torch.int64 \[3\]"):
        model(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="id 11 is outside the vocabulary, expected 0 to 10"):
        model(torch.tensor([[1, 11]]))
    with pytest.raises(ValueError, match="id -1 is outside"):
        model(torch.tensor([[-1, 1]]))
    with pytest.raises(ValueError, match="vocab_size: found 0"):
        Transformer(ModelConfig())
    encoder = model_of(small_config(is_causal=False))
    with pytest.raises(ValueError, match="needs is_causal"):
        encoder(torch.zeros(1, 3, dtype=torch.int64), return_state=True)
    _, state = model(torch.zeros(2, 3, dtype=torch.int64), return_state=True)
    with pytest.raises(ValueError, match="state has 2 rows, ids 1"):
        model(torch.zeros(1, 1, dtype=torch.int64), state=state)
    with pytest.raises(ValueError, match="state has 1 layers, expected 2"):
        model(
            torch.zeros(2, 1, dtype=torch.int64), state=ModelState(state.layers[:1], state.position)
        )


def test_no_tokens():
    model = model_of(small_config("linear"))
    assert model(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, 11)
    assert model(torch.zeros(0, 5, dtype=torch.int64)).shape == (0, 5, 11)


@pytest.mark.parametrize("name", ["cosformer", "performer", "longformer_t5", "sinusoidal_offset"])
def test_copies_pickles_and_state_dicts(name):
    model = model_of(CAUSAL[name])
    ids = ids_of(model.config)
    expected = model(ids)
    assert torch.equal(copy.deepcopy(model)(ids), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(ids), expected)
    torch.manual_seed(9)
    other = model_of(model.config)
    assert not torch.equal(other(ids), expected)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(ids), expected)


@pytest.mark.parametrize("name", ["performer", "sinusoidal_offset", "bigbird", "linformer"])
def test_a_model_built_without_memory_is_filled_later(name):
    model = model_of(ALL[name])
    ids = ids_of(model.config)
    with torch.device("meta"):
        empty = Transformer(model.config).eval()
        assert empty(torch.zeros(2, 5, dtype=torch.int64, device="meta")).shape == (2, 5, 11)
    assert all(p.is_meta for p in empty.parameters())
    filled = copy.deepcopy(empty)
    filled.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(filled(ids), model(ids))
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert torch.equal(empty(ids), model(ids))


@pytest.mark.parametrize(
    "config",
    [
        small_config(num_layers=1, position="sinusoidal"),
        small_config("softmax", num_layers=1, position="t5", relative_buckets=8, max_distance=10),
    ],
    ids=["cosformer_sinusoidal", "softmax_t5"],
)
def test_behaviour_31_compiles_whole(config):
    model = model_of(config)
    ids = ids_of(config)
    mask = torch.arange(20).expand(2, 20) < torch.tensor([[20], [14]])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    def values(run):
        model.zero_grad()
        logits = run(ids, key_mask=mask)
        logits.square().mean().backward()
        return {"": logits, **{name: p.grad.clone() for name, p in model.named_parameters()}}

    found, expected = values(compiled), values(model)
    for name, value in expected.items():
        if value.norm() > 1e-6:  # a key's bias has no effect on softmax but for rounding
            assert relative(found[name], value) < 1e-5, name


def test_a_compiled_step_serves_every_position():
    model = model_of(small_config())
    ids = ids_of(model.config)
    with torch.no_grad():
        _, state = model(ids[:, :4], return_state=True)
    expected, _ = model(ids[:, 4:], state=state, return_state=True)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    step = torch.compile(
        lambda ids, state: model(ids, state=state, return_state=True),
        fullgraph=True,
        backend=backend,
    )
    parts = []
    with torch.no_grad():
        for at in range(4, 20):
            logits, state = step(ids[:, at : at + 1], state)
            parts.append(logits)
    assert relative(torch.cat(parts, 1), expected) < 1e-5
    assert len(graphs) == 1


def test_bfloat16_follows_float32():
    config = small_config(["softmax", "cosformer"])
    model = model_of(config)
    ids = ids_of(config)
    expected = model(ids)
    half = copy.deepcopy(model).to(torch.bfloat16)(ids)
    assert half.dtype == torch.bfloat16 and relative(half, expected) < 0.03


def test_behaviour_44_attention_matrices():
    config = small_config(["softmax", "cosformer"])
    model = model_of(config, torch.float64)
    matrices = model.attention_matrices(ids_of(config))
    assert [list(m.shape) for m in matrices] == [[2, 2, 20, 20]] * 2
    assert relative(matrices[0].sum(-1), torch.ones(2, 2, 20)) < 1e-12
    assert not matrices[1].triu(1).any()
