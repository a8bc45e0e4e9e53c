"""The state between calls: splits, decoding, rows, files (behaviours 23, 24, 26, 30)."""

import copy
import io
import json
import os
import pickle
import struct
import subprocess
import sys

import cosformer
import pytest
import torch
from cosformer import LinearState
from helpers import PYTHON, inputs, relative

COSINE = {"feature_map": "relu", "reweight_len": 64}
KINDS = {
    "cosine": COSINE,
    "relu": {},
    "elu1": {"feature_map": "elu1"},
    "elu1_rotary": {"feature_map": "elu1", "rotary_base": 100.0, "rotary_interleaved": True},
    "none": {"normalizer": "none", "reweight_len": 64},
}


def run(tensors, state=None, **options):
    return cosformer.linear_attention(
        *tensors, is_causal=True, state=state, return_state=True, **options
    )


def cut(tensors, begin, end):
    return [t[:, begin:end] for t in tensors]


def equal(a, b):
    assert a[4:] == b[4:]
    assert all(torch.equal(x, y) for x, y in zip(a[:4], b[:4], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_behaviour_23_every_split_gives_the_same(kind):
    tensors = inputs(q_len=33, heads=4, kv_heads=2, dim=6, value_dim=5, dtype=torch.float32)
    whole, end = run(tensors, **KINDS[kind])
    for at in range(34):
        first, state = run(cut(tensors, 0, at), **KINDS[kind])
        second, after = run(cut(tensors, at, 33), state, **KINDS[kind])
        assert relative(torch.cat([first, second], 1), whole) < 1e-5
        assert relative(after.kv_state, end.kv_state) < 1e-5
        assert relative(after.k_sum, end.k_sum) < 1e-5
        assert torch.equal(after.position, end.position) and torch.equal(after.start, end.start)


@pytest.mark.parametrize("kind", KINDS)
def test_behaviours_23_24_steps_equal_parallel_and_keep_the_structure(kind):
    options = KINDS[kind]
    tensors = inputs(q_len=20, heads=4, kv_heads=2, dim=6, value_dim=5, dtype=torch.float32)
    whole, end = run(tensors, **options)
    _, state = run(cut(tensors, 0, 0), **options)
    assert isinstance(state, LinearState)
    in_place = state.clone()
    outs, steps = [], []
    normalizer = {k: v for k, v in options.items() if k == "normalizer"}
    for t in range(20):
        token = cut(tensors, t, t + 1)
        out, state = run(token, state, **options)
        outs.append(out)
        steps.append(cosformer.linear_attention_decode_step_(*token, in_place, **normalizer))
    assert relative(torch.cat(outs, 1), whole) < 1e-5
    assert relative(torch.cat(steps, 1), whole) < 1e-5
    for got in (state, in_place):
        assert isinstance(got, LinearState) and got[4:] == end[4:]
        for a, b in zip(got[:4], end[:4], strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            assert relative(a, b) < 1e-5


def test_gradients_flow_through_the_state():
    tensors = inputs(q_len=12)
    grad = torch.randn(2, 12, 2, 4, dtype=torch.float64)
    results = []
    for split in (None, 5):
        leaves = [t.clone().requires_grad_() for t in tensors]
        if split is None:
            out, _ = run(leaves, **COSINE)
        else:
            first, state = run(cut(leaves, 0, split), **COSINE)
            second, _ = run(cut(leaves, split, 12), state, **COSINE)
            out = torch.cat([first, second], 1)
        out.backward(grad)
        results.append([leaf.grad for leaf in leaves])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_detach_cuts_the_graph():
    tensors = [t.requires_grad_() for t in inputs()]
    _, state = run(tensors, **COSINE)
    assert state.kv_state.requires_grad
    detached = state.detach()
    assert not detached.kv_state.requires_grad and not detached.k_sum.requires_grad


def test_rows_stand_at_different_positions():
    """Right padding does not count: each row goes on after its last real token."""
    tensors = inputs(batch=3, q_len=10, dtype=torch.float32)
    lengths = torch.tensor([10, 4, 7])
    mask = torch.arange(10) < lengths[:, None]
    _, state = run(tensors, key_mask=mask, **COSINE)
    assert torch.equal(state.position, lengths)
    more = inputs(batch=3, q_len=1, dtype=torch.float32)
    out, after = run(more, state, **COSINE)
    in_place = state.clone()
    step = cosformer.linear_attention_decode_step_(*more, in_place)
    assert torch.equal(after.position, lengths + 1)
    for row, length in enumerate(lengths.tolist()):
        alone = [
            torch.cat([t[row : row + 1, :length], m[row : row + 1]], 1)
            for t, m in zip(tensors, more, strict=True)
        ]
        expected, _ = run(alone, **COSINE)
        assert relative(out[row], expected[0, -1:]) < 1e-5
        assert relative(step[row], expected[0, -1:]) < 1e-5


def test_select_for_beam_search():
    tensors = inputs(batch=3, q_len=5, dtype=torch.float32)
    _, state = run(tensors, **COSINE)
    rows = torch.tensor([2, 0, 0, 1])
    chosen = state.select(rows)
    assert chosen.kv_state.shape[0] == 4
    more = inputs(batch=4, q_len=1, dtype=torch.float32)
    out, _ = run(more, chosen, **COSINE)
    history = [torch.cat([t[rows], m], 1) for t, m in zip(tensors, more, strict=True)]
    assert relative(out, run(history, **COSINE)[0][:, -1:]) < 1e-5
    equal(state.select([1]), state.select(torch.tensor([1])))


def test_clone_is_untouched_by_later_steps():
    tensors = inputs(q_len=3, dtype=torch.float32)
    _, state = run(tensors, **COSINE)
    kept, before = state.clone(), [t.clone() for t in state[:4]]
    cosformer.linear_attention_decode_step_(*cut(tensors, 0, 1), state)
    assert all(torch.equal(a, b) for a, b in zip(kept[:4], before, strict=True))
    assert not torch.equal(state.kv_state, kept.kv_state)
    # Restored, it gives the same again.
    first = cosformer.linear_attention_decode_step_(*cut(tensors, 1, 2), kept.clone())
    assert torch.equal(first, cosformer.linear_attention_decode_step_(*cut(tensors, 1, 2), kept))


def test_deepcopy_and_pickle():
    _, state = run(inputs(), **COSINE)
    equal(copy.deepcopy(state), state)
    equal(pickle.loads(pickle.dumps(state)), state)
    buffer = io.BytesIO()
    torch.save(state._asdict(), buffer)
    buffer.seek(0)
    equal(LinearState(**torch.load(buffer, weights_only=True)), state)


def test_to():
    _, state = run(inputs(dtype=torch.float32), **COSINE)
    double = state.to(torch.float64)
    assert double.kv_state.dtype == double.k_sum.dtype == torch.float64
    assert double.position.dtype == torch.int64
    equal(double.to("cpu", torch.float32), state)
    with pytest.raises(ValueError, match="float16, expected torch.float32 or torch.float64"):
        state.to(torch.float16)


def test_behaviour_26_a_new_process_goes_on_from_a_saved_state(tmp_path):
    tensors = inputs(q_len=20, heads=4, kv_heads=2, dim=6, dtype=torch.float32)
    _, state = run(cut(tensors, 0, 11), **COSINE)
    state.save(tmp_path / "state.safetensors")
    expected, end = run(cut(tensors, 11, 20), state, **COSINE)
    torch.save(cut(tensors, 11, 20), tmp_path / "rest.pt")
    program = """
import sys
folder = sys.argv[1]
import torch, cosformer
torch.set_num_threads(1)
state = cosformer.LinearState.load(folder + "/state.safetensors")
out, state = cosformer.linear_attention(*torch.load(folder + "/rest.pt"), reweight_len=64,
                                        is_causal=True, state=state, return_state=True)
torch.save([out, *state[:4]], folder + "/out.pt")
"""
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        check=True,
        env={**os.environ, "PYTHONPATH": str(PYTHON)},
    )
    for a, b in zip(torch.load(tmp_path / "out.pt"), [expected, *end[:4]], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load_keep_everything(kind, tmp_path):
    from safetensors.torch import load_file

    path = str(tmp_path / "state")
    for dtype in (torch.float32, torch.float64):
        _, state = run(inputs(dtype=dtype), **KINDS[kind])
        state.save(path)
        equal(LinearState.load(path), state)
        assert torch.equal(load_file(path)["kv_state"], state.kv_state)
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_an_empty_batch_is_saved_too(tmp_path):
    _, state = run(inputs(batch=0), **COSINE)
    state.save(tmp_path / "state")
    equal(LinearState.load(tmp_path / "state"), state)


def edited(path, change, data=None):
    """The file with its JSON header changed."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    body = content[8 + length :] if data is None else data
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def set_item(*keys, value):
    def change(header):
        for key in keys[:-1]:
            header = header[key]
        header[keys[-1]] = value

    return change


def delete(*keys):
    def change(header):
        for key in keys[:-1]:
            header = header[key]
        del header[keys[-1]]

    return change


BAD_HEADERS = {
    "no tensor k_sum": delete("k_sum"),
    "has no metadata, expected format": delete("__metadata__"),
    "has no metadata 'kind'": delete("__metadata__", "kind"),
    "format 'other', expected 'cosformer.linear_state'": set_item(
        "__metadata__", "format", value="other"
    ),
    "format_version '9', this version reads '1'": set_item(
        "__metadata__", "format_version", value="9"
    ),
    "kind 'window', expected 'linear'": set_item("__metadata__", "kind", value="window"),
    "feature_map 'tanh', expected": set_item("__metadata__", "feature_map", value="tanh"),
    "reweight_len '-3', expected an integer": set_item("__metadata__", "reweight_len", value="-3"),
    "rotary_base 'x', expected a number": set_item("__metadata__", "rotary_base", value="x"),
    "rotary_interleaved 'maybe'": set_item("__metadata__", "rotary_interleaved", value="maybe"),
    "kv_state is I64, expected F32 or F64": set_item("kv_state", "dtype", value="I64"),
    "start is F32, expected I64": set_item("start", "dtype", value="F32"),
    "kv_state has 3 dimensions, expected 4": set_item("kv_state", "shape", value=[2, 2, 32]),
    "more elements than a file can hold": set_item("kv_state", "shape", value=[2**62, 2**62, 1, 1]),
    "kv_state has a bad shape": set_item("kv_state", "shape", value=[-2, 2, 8, 4]),
    "kv_state lies at": set_item("kv_state", "data_offsets", value=[0, 2**63]),
    "malformed entry": set_item("kv_state", value=7),
    "has a tensor at byte": lambda header: set_item(
        "start", "data_offsets", value=header["position"]["data_offsets"]
    )(header),
    "unknown tensor 'extra'": set_item(
        "extra", value={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    ),
    "expected .rows, heads, features, value_dim.": set_item(
        "kv_state", "shape", value=[1, 4, 8, 4]
    ),
    "its tensors take": lambda header: (
        set_item("kv_state", "shape", value=[2, 2, 8, 3])(header),
        set_item("kv_state", "data_offsets", value=[0, 768])(header),
    ),
}


@pytest.mark.parametrize("message", BAD_HEADERS)
def test_a_malformed_state_file_is_an_error(message, tmp_path):
    _, state = run(inputs(), **COSINE)
    path = tmp_path / "state"
    state.save(path)
    edited(path, BAD_HEADERS[message])
    with pytest.raises(RuntimeError, match=f"LinearState::load: {path} .*{message}"):
        LinearState.load(path)


def test_a_truncated_missing_or_foreign_state_file_is_an_error(tmp_path):
    _, state = run(inputs(), **COSINE)
    path = tmp_path / "state"
    state.save(path)
    whole = path.read_bytes()
    for length in (0, 7, 8, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(RuntimeError, match="LinearState::load"):
            LinearState.load(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(RuntimeError, match="its tensors take"):
        LinearState.load(path)
    # A size that no memory has: found out before anything is read.
    path.write_bytes(whole)
    os.truncate(path, 2**42)
    with pytest.raises(RuntimeError, match="its tensors take"):
        LinearState.load(path)
    path.write_bytes(struct.pack("<Q", 2**63) + whole[8:])
    with pytest.raises(RuntimeError, match="announces a header"):
        LinearState.load(path)
    text = b'{"k_sum":1,"k_sum":2}'
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(RuntimeError, match="names 'k_sum' twice"):
        LinearState.load(path)
    with pytest.raises(RuntimeError, match="cannot be opened: No such file"):
        LinearState.load(tmp_path / "missing")
    with pytest.raises(RuntimeError, match="is no regular file"):
        LinearState.load(tmp_path)


def test_a_failed_save_leaves_the_old_file(tmp_path):
    _, state = run(inputs(), **COSINE)
    path = tmp_path / "state"
    state.save(path)
    before = path.read_bytes()
    program = """
import resource, signal, sys, torch, cosformer
state = cosformer.LinearState.load(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
try:
    state.save(sys.argv[1])
except RuntimeError as error:
    sys.exit(0 if "File too large" in str(error) else 3)
"""
    result = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        env={**os.environ, "PYTHONPATH": str(PYTHON)},
    )
    assert result.returncode == 0
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["state"]
    with pytest.raises(RuntimeError, match="cannot create a file beside .*/nowhere/state"):
        state.save(tmp_path / "nowhere" / "state")


def test_a_state_of_another_kind_is_an_error():
    tensors = inputs()
    _, state = run(tensors, **COSINE)
    for options, message in (
        ({"reweight_len": 65}, "reweight_len 64.*the call has .*reweight_len 65"),
        ({}, "reweight_len 64.*the call has .*reweight_len 0"),
        ({**COSINE, "feature_map": "elu1"}, "feature_map 'relu'.*the call has .*'elu1'"),
        ({**COSINE, "rotary_base": 9.0}, "rotary_base 0; the call has .*rotary_base 9"),
    ):
        with pytest.raises(RuntimeError, match=message):
            run(tensors, state, **options)
    with pytest.raises(RuntimeError, match="kind 'window'"):
        run(tensors, state._replace(kind="window"), **COSINE)
    with pytest.raises(
        RuntimeError,
        match="Double, expected Float for Float inputs|Double and Double, expected Float",
    ):
        run([t.float() for t in tensors], state, **COSINE)
    with pytest.raises(
        RuntimeError, match="kv_state has shape .2, 2, 8, 4., expected .* = .1, 2, 8, 4."
    ):
        run([t[:1] for t in tensors], state, **COSINE)


def test_a_start_that_contradicts_the_state_is_an_error():
    tensors = inputs()
    _, state = run(tensors, **COSINE)
    assert torch.equal(
        run(tensors, state, kv_start=7, q_start=7, **COSINE)[0], run(tensors, state, **COSINE)[0]
    )
    with pytest.raises(RuntimeError, match="kv_start of row 0 is 3, the state's position is 7"):
        run(tensors, state, kv_start=3, **COSINE)
    with pytest.raises(RuntimeError, match="q_start of row 0 is 3, the state's position is 7"):
        run(tensors, state, q_start=3, **COSINE)


def test_a_state_is_a_memory_for_cross_attention():
    """Encoder once, then queries over its constant-size memory."""
    q, k, v = inputs(q_len=4, kv_len=9)
    _, memory = cosformer.linear_attention(q[:, :0], k, v, reweight_len=64, return_state=True)
    out = cosformer.linear_attention(
        q, k[:, :0], v[:, :0], reweight_len=64, state=memory, q_start=0
    )
    assert relative(out, cosformer.linear_attention(q, k, v, reweight_len=64)) < 1e-12


def test_packed_sequences_have_a_state_each():
    q, k, v = inputs(batch=1, q_len=9, dtype=torch.float32)
    offsets = torch.tensor([0, 4, 4, 9])
    _, state = run((q, k, v), cu_seqlens_q=offsets, **COSINE)
    assert state.position.tolist() == [4, 0, 5]
    more = inputs(batch=3, q_len=2, dtype=torch.float32)
    out, _ = run(more, state, **COSINE)
    for row, (begin, end) in enumerate(((0, 4), (4, 4), (4, 9))):
        alone = [
            torch.cat([t[:, begin:end], m[row : row + 1]], 1)
            for t, m in zip((q, k, v), more, strict=True)
        ]
        assert relative(out[row], run(alone, **COSINE)[0][0, -2:]) < 1e-5


def test_rows_are_selected_by_any_integers():
    _, state = run(inputs(batch=3), **COSINE)
    for rows in ([2, 0], (2, 0), torch.tensor([2, 0], dtype=torch.int16)):
        equal(state.select(rows), state.select(torch.tensor([2, 0])))
    assert state.select([]).position.shape == (0,)


def test_decode_refuses_gradients_and_other_lengths():
    tensors = inputs(q_len=2)
    _, state = run(tensors, **COSINE)
    with pytest.raises(RuntimeError, match="query has length 2, key has 2, expected 1"):
        cosformer.linear_attention_decode_step_(*tensors, state)
    token = [t.requires_grad_() for t in cut(tensors, 0, 1)]
    with pytest.raises(RuntimeError, match="has no gradient: call it under torch.no_grad"):
        cosformer.linear_attention_decode_step_(*token, state)
    with torch.no_grad():
        cosformer.linear_attention_decode_step_(*token, state)
    strided = state._replace(kv_state=state.kv_state.transpose(2, 3).contiguous().transpose(2, 3))
    with torch.no_grad(), pytest.raises(RuntimeError, match="kv_state is not contiguous"):
        cosformer.linear_attention_decode_step_(*token, strided)
    with torch.no_grad():
        cosformer.linear_attention_decode_step_(*token, strided.clone())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_invalidates_what_autograd_saved_of_the_state(mode):
    tensors = inputs(q_len=2)
    _, state = run(tensors, **COSINE)
    leaf = tensors[0].clone().requires_grad_()
    out, _ = run((leaf, *tensors[1:]), state, **COSINE)
    with mode():
        cosformer.linear_attention_decode_step_(*cut(tensors, 0, 1), state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_state_made_in_inference_mode_is_stepped():
    tensors = inputs(q_len=2)
    with torch.inference_mode():
        _, state = run(cut(tensors, 0, 1), **COSINE)
        out = cosformer.linear_attention_decode_step_(*cut(tensors, 1, 2), state)
    assert relative(out, run(tensors, **COSINE)[0][:, 1:]) < 1e-12
