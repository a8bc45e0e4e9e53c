"""The examples in the package's documentation run, and what is public has one."""

import doctest
import importlib
import inspect
import pkgutil

import cosformer
import pytest


def modules():
    walk = pkgutil.walk_packages(cosformer.__path__, "cosformer.")
    return ["cosformer", *(found.name for found in walk if not found.name.endswith("__main__"))]


def public():
    """What the package and its layers export and document."""
    for module in (cosformer, cosformer.nn):
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isfunction(thing) or inspect.isclass(thing):
                yield f"{module.__name__}.{name}", thing


@pytest.mark.parametrize("name", modules())
def test_examples(name):
    flags = doctest.NORMALIZE_WHITESPACE
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=flags, report=True)
    assert failed == 0


def test_everything_public_has_an_example():
    bare = [name for name, thing in public() if ">>>" not in (inspect.getdoc(thing) or "")]
    # A base of layers, and a union of types.
    assert set(bare) <= {"cosformer.nn.Attention", "cosformer.nn.AttentionState"}
