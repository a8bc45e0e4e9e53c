"""The layers are ordinary modules: copies, files, devices, autocast, checkpoints, export,
compilation (behaviour 31), data parallel training."""

import copy
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import cosformer
import pytest
import torch
from helpers import relative
from layer_cases import CASES, EMBED, HEADS, KINDS, STATEFUL, options_of
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

FORMS = [f"{kind}_full" for kind in KINDS] + [
    f"{kind}_causal" for kind in KINDS if kind != "linformer"
]


def block(kind, is_causal=False, **options):
    torch.manual_seed(3)
    attention = cosformer.nn.attention(
        kind, EMBED, HEADS, **{**options_of(kind, is_causal), **options}
    )
    return cosformer.nn.Block(attention, 40, gated=True)


def gradients(module, x, **call):
    """Output and gradients by name."""
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    out = module(leaf, **call)
    out.square().sum().backward()
    named = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "x": leaf.grad, **named}


def check_equal(found, expected, limit=0.0):
    assert found.keys() == expected.keys()
    for name in expected:
        if limit == 0.0:
            assert torch.equal(found[name], expected[name]), name
        elif expected[name].norm() > 1e-4:
            assert relative(found[name], expected[name]) <= limit, name


@pytest.mark.parametrize("kind", KINDS)
def test_behaviour_30_copies_and_files_are_identical(kind, tmp_path):
    module = block(kind)
    x = torch.randn(2, 11, EMBED)
    expected = gradients(module, x)
    check_equal(gradients(copy.deepcopy(module), x), expected)
    check_equal(gradients(pickle.loads(pickle.dumps(module)), x), expected)
    other = block(kind)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter)
    torch.save(module.state_dict(), tmp_path / "state")
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True), strict=True)
    check_equal(gradients(other, x), expected)
    torch.save(module, tmp_path / "module")
    check_equal(gradients(torch.load(tmp_path / "module", weights_only=False), x), expected)
    # A projection is kept as it is, whatever the seed of the layer that loads it.
    if kind == "performer":
        other = block(kind, projection_seed=9)
        other.load_state_dict(module.state_dict())
        check_equal(gradients(other, x), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_construction_without_memory(kind):
    real = block(kind)
    with torch.device("meta"):
        module = block(kind)
    assert all(t.is_meta for t in (*module.parameters(), *module.buffers()))
    attention = cosformer.nn.attention(kind, EMBED, HEADS, device="meta", **options_of(kind))
    assert all(t.is_meta for t in (*attention.parameters(), *attention.buffers()))
    assert module(torch.randn(2, 5, EMBED, device="meta")).shape == (2, 5, EMBED)
    module.to_empty(device="cpu")
    for tensor in module.state_dict().values():
        tensor.fill_(torch.nan)
    torch.manual_seed(3)
    module.reset_parameters()
    state = module.state_dict()
    assert all(tensor.isfinite().all() for tensor in state.values())
    if kind == "performer":
        assert torch.equal(state["attention.projection"], real.attention.projection)
    # Loading takes a meta module too.
    with torch.device("meta"):
        module = block(kind)
    module.load_state_dict(real.state_dict(), assign=True)
    x = torch.randn(2, 11, EMBED)
    assert torch.equal(module(x), real(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(kind, dtype):
    module = block(kind)
    x = torch.randn(2, 11, EMBED)
    mask = torch.arange(11) < torch.tensor([[11], [6]])
    exact = gradients(module, x, key_mask=mask)
    with torch.autocast("cpu", dtype=dtype):
        attended = module.attention(x, key_mask=mask)
        found = gradients(module, x, key_mask=mask)
    assert attended.dtype == dtype
    limit = 0.03 if dtype == torch.bfloat16 else 0.005
    assert relative(found["out"], exact["out"]) <= limit
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in found.values())
    with torch.no_grad():
        half = copy.deepcopy(module).to(dtype)
        out = half(x.to(dtype), key_mask=mask)
    assert out.dtype == dtype and relative(out, exact["out"]) <= 2 * limit


@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing(kind):
    dropout = {"dropout": 0.3} if kind in ("softmax", "linformer", "longformer", "bigbird") else {}
    module = block(kind, **dropout)
    module.dropout = 0.2
    x = torch.randn(2, 11, EMBED)
    torch.manual_seed(5)
    expected = gradients(module, x)
    torch.manual_seed(5)
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    out = checkpoint(module, leaf, use_reentrant=False)
    out.square().sum().backward()
    named = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    check_equal({"out": out.detach(), "x": leaf.grad, **named}, expected)


@pytest.mark.parametrize("name", FORMS)
def test_behaviour_31_layers_compile_whole_and_equal_eager(name):
    module = cosformer.nn.Block(CASES[name].layer(), 40)
    torch._dynamo.reset()
    in_graph = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 11, EMBED)
    mask = torch.arange(11) < torch.tensor([[11], [6]])
    for call in ({}, {"key_mask": mask}) if name == "cosformer_full" else ({"key_mask": mask},):
        expected = gradients(module, x, **call)
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        out = in_graph(leaf, **call)
        out.square().sum().backward()
        named = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        check_equal({"out": out.detach(), "x": leaf.grad, **named}, expected, 1e-6)


def test_behaviour_31_a_layer_through_inductor():
    module = CASES["cosformer_causal"].layer()
    torch._dynamo.reset()
    in_graph = torch.compile(module, fullgraph=True)
    x = torch.randn(2, 11, EMBED)
    expected = gradients(module, x)
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    out = in_graph(leaf)
    out.square().sum().backward()
    named = {n: p.grad for n, p in module.named_parameters()}
    check_equal({"out": out.detach(), "x": leaf.grad, **named}, expected, 1e-5)


def test_behaviour_31_lengths_and_packing_compile_once():
    layer = cosformer.nn.SoftmaxAttention(
        EMBED, HEADS, head_dim=8, is_causal=True, rotary_base=100.0, dropout=0.2
    )
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    in_graph = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    compiled = set()
    for length in (5, 9, 14):
        x = torch.randn(1, length, EMBED)
        packing = torch.tensor([0, 2, length])
        torch.manual_seed(length)
        found = in_graph(x, cu_seqlens_q=packing)
        torch.manual_seed(length)
        assert torch.equal(found, layer(x, cu_seqlens_q=packing))
        compiled.add(counter.frame_count)
    assert len(compiled) == 1


# How often decoding compiles: once for a state of constant size or a full ring; a cache that grows
# becomes dynamic in its second step, and kinds whose first tokens, blocks or window differ branch
# there. Never again for a position.
COMPILES = {
    "linear_causal": 1,
    "cosformer_causal": 1,
    "performer_causal_rotary": 1,
    "softmax_causal_rotary": 2,
    "longformer_window_alone": 1,
    "longformer_causal": 5,
    "bigbird_causal": 5,
}


@pytest.mark.parametrize("name", COMPILES)
def test_behaviour_31_compiled_decoding_serves_every_position(name):
    layer = STATEFUL[name].layer()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(layer.decode_step, fullgraph=True, backend=counter)
    x = torch.randn(2, 60, EMBED)
    with torch.no_grad():
        expected = layer(x)
        _, state = layer(x[:, :6], return_state=True)
    parts, after_half = [], 0
    for t in range(6, 60):
        out, state = step(x[:, t : t + 1].contiguous(), state)
        parts.append(out)
        if t == 34:
            after_half = counter.frame_count
    assert relative(torch.cat(parts, 1), expected[:, 6:]) <= STATEFUL[name].limit
    assert counter.frame_count == after_half <= COMPILES[name]


@torch.no_grad()
def test_a_compiled_chunk_refuses_a_start_that_contradicts_its_state():
    layer = STATEFUL["softmax_causal"].layer()
    x = torch.randn(1, 9, EMBED)
    _, state = layer(x[:, :4], return_state=True)
    torch._dynamo.reset()
    chunk = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = chunk(x[:, 4:], state=state, q_start=torch.tensor(4))
    assert relative(found, layer(x)[:, 4:]) <= 3e-6
    with pytest.raises(RuntimeError, match="q_start contradicts the state"):
        chunk(x[:, 4:], state=state, q_start=torch.tensor(5))


@pytest.mark.parametrize("kind", ["cosformer", "softmax", "linformer"])
def test_export(kind):
    layer = cosformer.nn.attention(kind, EMBED, HEADS, **options_of(kind, kind != "linformer"))
    batch, length = torch.export.Dim("batch", max=8), torch.export.Dim("length", min=2, max=40)
    x, mask = torch.randn(2, 11, EMBED), torch.ones(2, 11, dtype=torch.bool)
    sizes = {0: batch, 1: length}
    program = torch.export.export(
        layer, (x,), {"key_mask": mask}, dynamic_shapes={"query": sizes, "key_mask": sizes}
    )
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for shape in ((2, 11), (3, 17)):
        x = torch.randn(*shape, EMBED)
        mask = torch.rand(shape) > 0.3
        assert relative(loaded(x, key_mask=mask), layer(x, key_mask=mask)) <= 1e-6


def test_states_are_trees_and_pickle():
    for name in ("cosformer_causal", "softmax_causal", "performer_causal"):
        layer = STATEFUL[name].layer()
        with torch.no_grad():
            _, state = layer(torch.randn(2, 5, EMBED), return_state=True)
        flat, spec = torch.utils._pytree.tree_flatten(state)
        again = torch.utils._pytree.tree_unflatten(flat, spec)
        loaded = pickle.loads(pickle.dumps(state))
        assert type(again) is type(loaded) is type(state)
        for a, b in zip(loaded, state, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


DATA_PARALLEL = """
import copy, sys, torch, cosformer
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
rank, store, result = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(3)
x = torch.randn(4, 9, 24)
torch.manual_seed(rank)  # rank 0's parameters are everyone's
nn = cosformer.nn
layers = [
    nn.CosformerAttention(24, 4, reweight_len=64, is_causal=True),
    nn.PerformerAttention(24, 4),
    nn.SoftmaxAttention(24, 4, window=3),
    nn.LongformerAttention(24, 4, window=2, global_tokens=1),
]
model = torch.nn.Sequential(*(nn.Block(layer, 40) for layer in layers))
parallel = DistributedDataParallel(model)
parallel(x[2 * rank : 2 * rank + 2]).square().mean().backward()
grads = {name: p.grad.clone() for name, p in model.named_parameters()}
if rank == 0:
    single = copy.deepcopy(model)
    single.zero_grad()
    single(x).square().mean().backward()
    torch.save((grads, {name: p.grad for name, p in single.named_parameters()}), result)
torch.distributed.destroy_process_group()
"""


def test_two_processes_have_the_gradients_of_one(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    package = str(Path(cosformer.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join([package, environment.get("PYTHONPATH", "")])
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-c", DATA_PARALLEL, str(rank)),
                *(str(tmp_path / "store"), str(tmp_path / "gradients")),
            ],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
    found, expected = torch.load(tmp_path / "gradients")
    assert len(expected) > 40
    check_equal(found, expected, 1e-5)
