"""torch's operator check on the operators that the other files leave out (behaviour 31): the
portable paths, and those that take or give no tensors to compute with."""

import cosformer
import pytest
import test_operators as linear
import test_softmax_operators as softmax
import torch
from cosformer._softmax import _arguments
from helpers import inputs
from torch._subclasses.fake_tensor import FakeTensorMode

OPS = torch.ops.cosformer
# A portable path looks at values (masks, starts, offsets, seeds) to choose its way, and files are
# read and written at once: no tracing. What they say of themselves is checked all the same.
UNTRACED = ("test_schema", "test_autograd_registration")
ALL = (*UNTRACED, "test_faketensor", "test_aot_dispatch_dynamic")


def check(operator, args, tests):
    found = torch.library.opcheck(operator.default, args, test_utils=tests)
    assert found == dict.fromkeys(tests, "SUCCESS")


@pytest.mark.parametrize("name", linear.NAMES)
def test_opcheck_linear_attention_portable(name):
    options, tensors = linear.samples()[name]
    tensors = [t.requires_grad_() for t in tensors]
    args = (*linear.arguments(*tensors, **options), *linear.spec(options), True, True)
    traced = name in ("plain", "masks", "rotary")
    check(OPS.linear_attention_portable, args, ALL if traced else UNTRACED)


@pytest.mark.parametrize("name", softmax.NAMES)
def test_opcheck_softmax_attention_portable(name):
    options, tensors = softmax.samples()[name]
    tensors = [t.requires_grad_() for t in tensors]
    args = (*_arguments(*tensors, **options), True)
    check(OPS.softmax_attention_portable, args, ALL if name == "masks" else UNTRACED)


@pytest.mark.parametrize("is_causal", [False, True])
def test_opcheck_performer_attention_portable(is_causal):
    q, k, v = inputs(dtype=torch.float32)
    projection = torch.randn(6, 4, requires_grad=True)
    args = (q.requires_grad_(), k, v, projection, *(None,) * 11, is_causal)
    args = (*args, "performer", "performer", True, True)
    check(OPS.performer_attention_portable, args, UNTRACED)


def fake(mode, value):
    return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value


def test_portable_paths_refuse_to_be_traced_where_values_decide():
    """An error that names what helps; it was a read of address 0 once."""
    offsets = torch.tensor([0, 3, 5])
    q, k, v = (torch.randn(1, 5, 2, 4) for _ in range(3))
    packed = {"cu_seqlens_q": offsets, "is_causal": True}
    linear_args = (*linear.arguments(q, k, v, **packed), *linear.spec(packed), True, True)
    calls = [
        (OPS.linear_attention_portable, linear_args),
        (OPS.softmax_attention_portable, (*_arguments(q, k, v, **packed), True)),
    ]
    for operator, args in calls:
        with FakeTensorMode() as mode, pytest.raises(RuntimeError, match="without _portable"):
            operator(*(fake(mode, value) for value in args))


def test_opcheck_of_files_and_facts(tmp_path):
    path = str(tmp_path / "state")
    state = linear.state_for(*inputs(), **linear.CAUSAL)
    check(OPS.linear_state_save, (*state, path), UNTRACED)
    check(OPS.linear_state_load, (path,), UNTRACED)
    assert torch.equal(cosformer.LinearState.load(path).kv_state, state.kv_state)
    for operator in (OPS.version, OPS.isa):
        check(operator, (), (*UNTRACED, "test_faketensor"))
