"""The examples in the package's documentation run, and every function and module has one."""

import doctest
import importlib
import inspect
import pkgutil

import cosformer
import pytest
import torch


def modules():
    walk = pkgutil.walk_packages(cosformer.__path__, "cosformer.")
    return ["cosformer", *(found.name for found in walk if not found.name.endswith("__main__"))]


def public():
    """The functions and modules that the package exports."""
    for module in (cosformer, cosformer.nn):
        for name in module.__all__:
            thing = getattr(module, name)
            is_module = inspect.isclass(thing) and issubclass(thing, torch.nn.Module)
            if inspect.isfunction(thing) or is_module:
                yield f"{module.__name__}.{name}", thing


@pytest.mark.parametrize("name", modules())
def test_examples(name):
    flags = doctest.NORMALIZE_WHITESPACE
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=flags, report=True)
    assert failed == 0


def test_every_function_and_module_has_an_example():
    bare = [name for name, thing in public() if ">>>" not in (inspect.getdoc(thing) or "")]
    assert bare == ["cosformer.nn.Attention"]  # the base of the others
