"""What layers carry from call to call: every split of a sequence gives the same result."""

import cosformer
import pytest
import torch
from cosformer import KvCache, LinearState
from helpers import relative
from layer_cases import EMBED, HEADS, STATEFUL, options_of


@pytest.fixture(params=STATEFUL)
def case(request):
    return STATEFUL[request.param]


def steps(layer, x, state, call):
    """One token at a time: (out, state)."""
    parts = []
    for t in range(x.shape[1]):
        out, state = layer.decode_step(x[:, t : t + 1], state, **call)
        parts.append(out)
    return torch.cat(parts, 1), state


@torch.no_grad()
def test_behaviour_23_every_split_into_two_chunks(case):
    layer, call = case.layer(), case.call()
    x = torch.randn(2, 21, EMBED)
    whole = layer(x, **call)
    for split in range(1, 21):
        first, state = layer(x[:, :split], return_state=True, **call)
        second = layer(x[:, split:], state=state, **call)
        assert relative(torch.cat([first, second], 1), whole) <= case.limit, split


def test_behaviour_23_one_token_at_a_time_after_every_prefill(case):
    layer, call = case.layer(), case.call()
    x = torch.randn(2, 19, EMBED)
    whole = layer(x, **call)
    types = set()
    for prefill in (0, 1, 7, 18):
        state, parts = None, []
        if prefill > 0:
            out, state = layer(x[:, :prefill], return_state=True, **call)
            parts, state = [out], state.detach()
            types.add(type(state))
        rest, state = steps(layer, x[:, prefill:], state, call)
        types.add(type(state))
        assert relative(torch.cat([*parts, rest], 1), whole) <= case.limit, prefill
        assert not rest.requires_grad
        assert (state.position == 19).all()
    assert len(types) == 1  # behaviour 24


@torch.no_grad()
def test_forward_leaves_the_state_and_clones_go_their_own_ways(case):
    layer, call = case.layer(), case.call()
    x = torch.randn(1, 12, EMBED)
    _, state = layer(x[:, :6], return_state=True, **call)
    kept = state.clone()
    layer(x[:, 6:], state=state, return_state=True, **call)
    for a, b in zip(state, kept, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    one, _ = steps(layer, x[:, 6:], state.clone(), call)
    two, _ = steps(layer, torch.randn(1, 6, EMBED), state.clone(), call)
    again, _ = steps(layer, x[:, 6:], state.clone(), call)
    assert not torch.equal(one, two) and torch.equal(one, again)
    # A clone that decoding has grown holds room; it, too, goes on twice.
    _, grown = steps(layer, x[:, 6:8], state, call)
    copy = grown.clone()
    one, _ = steps(layer, x[:, 8:], grown, call)
    two, _ = steps(layer, x[:, 8:], copy, call)
    assert torch.equal(one, two)


@torch.no_grad()
def test_rows_selected(case):
    layer, call = case.layer(), case.call()
    _, state = layer(torch.randn(3, 9, EMBED), return_state=True, **call)
    following = torch.randn(3, 1, EMBED)
    expected, _ = layer.decode_step(following, state.clone(), **call)
    rows = [2, 0, 2]
    found, after = layer.decode_step(following[rows], state.select(rows), **call)
    assert relative(found, expected[rows]) <= 1e-6
    assert after.position.shape == (3,)


@torch.no_grad()
def test_right_padded_prompts_go_on_at_their_own_places(case):
    layer, call = case.layer(), case.call()
    lengths = [4, 9, 1]
    x, following = torch.randn(3, 9, EMBED), torch.randn(3, 9, EMBED)
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    _, prompt = layer(x, key_mask=mask, return_state=True, **call)
    assert prompt.position.tolist() == lengths
    stepped, _ = steps(layer, following, prompt.clone(), call)
    # A chunk between steps.
    first, state = steps(layer, following[:, :2], prompt.clone(), call)
    chunk, state = layer(following[:, 2:6], state=state, return_state=True, **call)
    last, _ = steps(layer, following[:, 6:], state, call)
    chunked = torch.cat([first, chunk, last], 1)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        joined = torch.cat([x[one, :length], following[one]], 1)
        alone = layer(joined, **call)[:, length:]
        assert relative(stepped[one], alone) <= case.limit, row
        assert relative(chunked[one], alone) <= case.limit, row


@torch.no_grad()
def test_padded_chunks_move_a_row_on_by_its_real_tokens(case):
    layer, call = case.layer(), case.call()
    x = torch.randn(2, 12, EMBED)
    state, mask = None, torch.tensor([[True] * 3 + [False], [True] + [False] * 3])
    for begin in (0, 4, 8):
        _, state = layer(
            x[:, begin : begin + 4], key_mask=mask, state=state, return_state=True, **call
        )
    assert state.position.tolist() == [9, 3]
    following = torch.randn(2, 2, EMBED)
    found, _ = steps(layer, following, state, call)
    for row, count in enumerate((3, 1)):
        seen = torch.cat([x[row : row + 1, b : b + count] for b in (0, 4, 8)], 1)
        whole = layer(torch.cat([seen, following[row : row + 1]], 1), **call)
        assert relative(found[row : row + 1], whole[:, -2:]) <= case.limit


@torch.no_grad()
def test_masked_tokens_stay_hidden(case):
    """A hole in a prompt keeps its position."""
    layer, call = case.layer(), case.call()
    x = torch.randn(2, 20, EMBED)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0, 2] = mask[0, 0] = mask[1, 5] = mask[1, 6] = False
    expected = layer(x, key_mask=mask, **call)
    _, state = layer(x[:, :8], key_mask=mask[:, :8], return_state=True, **call)
    found, _ = steps(layer, x[:, 8:], state, call)
    assert relative(found, expected[:, 8:]) <= case.limit


@torch.no_grad()
def test_rows_may_start_anywhere(case):
    layer, call = case.layer(), case.call()
    x = torch.randn(2, 16, EMBED)
    starts = {"q_start": torch.tensor([3, 11]), "kv_start": torch.tensor([3, 11])}
    expected = layer(x, **starts, **call)
    first, state = layer(x[:, :7], return_state=True, **starts, **call)
    rest, _ = steps(layer, x[:, 7:], state, call)
    assert relative(torch.cat([first, rest], 1), expected) <= case.limit
    out, state = layer(x[:, :7], q_start=5, kv_start=5, return_state=True, **call)
    chunk = layer(x[:, 7:], state=state, q_start=12, kv_start=torch.tensor(12), **call)
    expected = layer(x, q_start=5, kv_start=5, **call)
    assert relative(torch.cat([out, chunk], 1), expected) <= case.limit


@torch.no_grad()
def test_behaviour_26_an_earlier_start_is_refused(case):
    layer, call = case.layer(), case.call()
    x = torch.randn(2, 6, EMBED)
    _, state = layer(x, return_state=True, **call)
    with pytest.raises((ValueError, RuntimeError), match="start.*6"):
        layer(x, state=state, q_start=4, kv_start=4, **call)


@torch.no_grad()
def test_other_dtypes(case):
    layer, call = case.layer().double(), case.call(torch.float64)
    x = torch.randn(2, 14, EMBED, dtype=torch.float64)
    first, state = layer(x[:, :5], return_state=True, **call)
    rest, _ = steps(layer, x[:, 5:], state.to(torch.float64).to("cpu"), call)
    assert relative(torch.cat([first, rest], 1), layer(x, **call)) <= 1e-7


def test_gradients_flow_through_the_state(case):
    layer, call = case.layer(), case.call()
    x = torch.randn(1, 10, EMBED)
    whole, split = (x.clone().requires_grad_() for _ in range(2))
    layer(whole, **call).square().sum().backward()
    state, loss = None, 0
    for begin, end in ((0, 4), (4, 8), (8, 10)):
        out, state = layer(split[:, begin:end], state=state, return_state=True, **call)
        loss = loss + out.square().sum()
    loss.backward()
    assert relative(split.grad, whole.grad) <= case.grad_limit
    # Steps after it leave the graph and what it saved alone.
    out, state = layer(x, return_state=True, **call)
    layer.decode_step(x[:, :1], state.detach().clone(), **call)
    out.sum().backward()


@torch.no_grad()
def test_behaviour_26_saved_and_loaded(case, tmp_path):
    layer, call = case.layer(), case.call()
    x = torch.randn(2, 14, EMBED)
    mask = torch.arange(9) < torch.tensor([9, 6])[:, None]
    for key_mask in (None, mask):
        _, state = layer(x[:, :9], key_mask=key_mask, return_state=True, **call)
        # Rows of a larger cache lie inside its memory.
        part = state.select([0, 0, 1])._map(lambda tensor: tensor[1:])
        part.save(tmp_path / "state")
        assert torch.equal(type(state).load(tmp_path / "state")[0], state[0])
        state.save(tmp_path / "state")
        loaded = type(state).load(tmp_path / "state")
        for a, b in zip(loaded, state, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        found, _ = steps(layer, x[:, 9:], loaded, call)
        expected, _ = steps(layer, x[:, 9:], state, call)
        assert torch.equal(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("global_tokens", [0, 3])
def test_behaviour_27_decodes_far_past_its_window_with_bounded_memory(global_tokens):
    options = {"window": 4, "dilation": 2, "global_tokens": global_tokens, "is_causal": True}
    layer = cosformer.nn.LongformerAttention(EMBED, HEADS, **options)
    x = torch.randn(2, 400, EMBED)
    state, parts, most, most_bytes = None, [], 0, 0
    for t in range(400):
        out, state = layer.decode_step(x[:, t : t + 1], state)
        parts.append(out)
        most = max(most, state.size)
        most_bytes = max(most_bytes, state.keys.untyped_storage().nbytes())
    assert relative(torch.cat(parts, 1), layer(x)) <= 2e-6
    # A ring of the window; first tokens beside twice as much.
    assert most <= (9 if global_tokens == 0 else 3 + 2 * 9)
    assert most_bytes <= 2 * 64 * 24 * 4  # the least buffer, not the length
    assert state.is_ring == (global_tokens == 0)
    assert (state.position == 400).all()


@torch.no_grad()
def test_growing_copies_little():
    layer = cosformer.nn.SoftmaxAttention(8, 2, is_causal=True)
    state, places = None, set()
    for _ in range(300):
        _, state = layer.decode_step(torch.randn(1, 1, 8), state)
        places.add((state.keys.data_ptr(), state.keys.shape[1]))
    assert len(places) <= 5  # 1, 64, 128, 256, 512
    _, state = layer(torch.randn(1, 5, 8), return_state=True)
    state = state.reserve(40)
    place = state.keys.data_ptr()
    for _ in range(35):
        _, state = layer.decode_step(torch.randn(1, 1, 8), state)
    assert state.keys.data_ptr() == place and state.size == 40


@torch.no_grad()
def test_a_cache_before_a_step_knows_what_it_holds():
    layer = cosformer.nn.SoftmaxAttention(8, 2, is_causal=True)
    _, state = layer(torch.randn(2, 3, 8), return_state=True)
    _, state = layer.decode_step(torch.randn(2, 1, 8), state)
    x = torch.randn(2, 1, 8)
    _, after = layer.decode_step(x, state)
    assert state.size == 4 and state.position.tolist() == [4, 4] and after.position[0] == 5
    assert relative(layer.decode_step(x, state)[0], layer(x, state=state)) <= 1e-6


@torch.no_grad()
def test_free_slots_of_a_ring_count_as_real():
    layer = cosformer.nn.SoftmaxAttention(8, 2, is_causal=True, window=4)
    mask = torch.arange(7) < torch.tensor([[7], [2]])
    mask[1, 0] = False  # a hole, and three slots that hold nothing yet
    _, state = layer(torch.randn(2, 7, 8), key_mask=mask, return_state=True)
    assert state.is_ring and state.key_mask.tolist() == [[True] * 5, [False] + [True] * 4]


@torch.no_grad()
def test_a_memory_for_cross_attention():
    """A call that is not causal takes a state too: an encoder's memory in two parts."""
    for kind in ("softmax", "linear", "cosformer", "performer"):
        layer = cosformer.nn.attention(kind, EMBED, HEADS, **options_of(kind))
        query, memory = torch.randn(2, 3, EMBED), torch.randn(2, 9, EMBED)
        expected = layer(query, memory, q_start=4)
        none = torch.randn(2, 0, EMBED)
        _, state = layer(none, memory[:, :4], return_state=True, kv_start=0)
        if kind == "softmax":
            found = layer(none, memory[:, 4:], state=state, return_state=True)
            assert found[1].size == 9
            continue
        found = layer(query, memory[:, 4:], state=state, q_start=4)
        assert relative(found, expected) <= 1e-5


@torch.no_grad()
def test_half_types_and_autocast_keep_a_cache_of_their_own():
    layer = cosformer.nn.SoftmaxAttention(EMBED, HEADS, is_causal=True)
    x = torch.randn(2, 9, EMBED)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, state = layer(x[:, :6], return_state=True)
        rest, state = steps(layer, x[:, 6:], state, {})
    assert out.dtype == rest.dtype == state.keys.dtype == torch.bfloat16
    assert relative(torch.cat([out, rest], 1), layer(x)) <= 2e-2
    with pytest.raises(ValueError, match="batch, kv_heads, dims and type must agree"):
        layer(x, state=state)


def test_state_of_another_kind_is_an_error():
    make = cosformer.nn.attention
    x = torch.randn(1, 3, 8)
    layers = {kind: make(kind, 8, 2, is_causal=True) for kind in ("softmax", "linear", "performer")}
    states = {kind: layer(x, return_state=True)[1].detach() for kind, layer in layers.items()}
    assert type(states["softmax"]) is KvCache and type(states["linear"]) is LinearState
    calls = {
        "forward": lambda layer, state: layer(x, state=state),
        "step": lambda layer, state: layer.decode_step(x[:, :1], state),
    }
    for call in calls.values():
        for kind in ("linear", "performer"):
            with pytest.raises(ValueError, match="is a KvCache, expected a LinearState"):
                call(layers[kind], states["softmax"])
            with pytest.raises(ValueError, match="is a LinearState, expected a KvCache"):
                call(layers["softmax"], states[kind])
        for kind, other in (("linear", "performer"), ("performer", "linear")):
            with pytest.raises((ValueError, RuntimeError), match="performer|linear"):
                call(layers[kind], states[other])
    four = make("softmax", 8, 2, is_causal=True, window=4)
    six = make("softmax", 8, 2, is_causal=True, window=6)
    _, of_four = four(x, return_state=True)
    message = 'keeps the last 5 tokens, kind "softmax" of these options needs the last 7 tokens'
    with pytest.raises(ValueError, match=message):
        six(x, state=of_four)
    with pytest.raises(ValueError, match="needs all tokens"):
        layers["softmax"].decode_step(x[:, :1], of_four)
    one_head = make("softmax", 8, 2, is_causal=True, num_kv_heads=1)
    with pytest.raises(ValueError, match=r"the state holds keys \[1, 3, 2, 4\]"):
        one_head(x, state=states["softmax"])
    with pytest.raises(ValueError, match=r"expected \[2, slots, 2, 4\]"):
        layers["softmax"](x.expand(2, 3, 8), state=states["softmax"])
    longformer = make("longformer", 8, 2, is_causal=True, window=2)
    with pytest.raises(ValueError, match="global_mask with a state"):
        longformer(x, global_mask=torch.ones(1, 3, dtype=torch.bool), return_state=True)
    with pytest.raises(ValueError, match="keeps no state of packed sequences"):
        layers["softmax"](x, cu_seqlens_q=torch.tensor([0, 3]), return_state=True)
    with pytest.raises(ValueError, match="q_start contradicts the state, which continues at 3"):
        layers["softmax"](x, state=states["softmax"], q_start=7)
    ring = KvCache(torch.randn(1, 2, 1, 1), torch.randn(1, 2, 1, 1), *[torch.zeros(1)] * 2, 2)
    with pytest.raises(ValueError, match="a ring has no order"):
        ring._replace(is_ring=True).append(ring.keys, ring.values)


FILES = {
    "empty": (b"", "no safetensors file"),
    "short": (b"\x10\0\0\0\0\0\0\0{}", "header"),
    "no JSON": (b"\x02\0\0\0\0\0\0\0{[", "header"),
}


@pytest.mark.parametrize("name", FILES)
def test_behaviour_39_malformed_files_are_errors(name, tmp_path):
    data, message = FILES[name]
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(RuntimeError, match=f"file.*{message}"):
        KvCache.load(tmp_path / "file")


def test_a_cache_file_is_checked(tmp_path):
    layer = cosformer.nn.SoftmaxAttention(8, 2, is_causal=True, window=2)
    _, state = layer(torch.randn(2, 9, 8), return_state=True)
    path = tmp_path / "state"
    state.detach().save(path)
    data = path.read_bytes()
    with pytest.raises(RuntimeError, match="KvCache"):
        _, linear = cosformer.nn.LinearAttention(8, 2)(torch.randn(2, 9, 8), return_state=True)
        linear.detach().save(tmp_path / "linear")
        KvCache.load(tmp_path / "linear")
    for cut in range(0, len(data), 7):
        path.write_bytes(data[:cut])
        with pytest.raises(RuntimeError, match="KvCache.load"):
            KvCache.load(path)
    path.write_bytes(data.replace(b'"size":"3"', b'"size":"9"'))
    with pytest.raises(RuntimeError, match="size is 9"):
        KvCache.load(path)
    with pytest.raises(OSError):
        KvCache.load(tmp_path / "nothing")
    # It appears whole or not at all.
    with pytest.raises(OSError):
        state.detach().save(tmp_path / "no folder" / "state")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["linear", "state"]
