"""A model folder to and from a ``Transformer``: the one that C++ and the program read too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from cosformer._files import write_atomically, write_text
from cosformer.models._nearest_key import nearest_key
from cosformer.models.config import ModelConfig

if TYPE_CHECKING:
    from cosformer.models.transformer import Transformer

    _Model = TypeVar("_Model", bound="Transformer")

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
TOKENIZER_FILE = "tokenizer.json"

#: Floating-point types that every part of the library reads, by their names in the format.
_DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F64": torch.float64,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
#: What messages call a type of the format, as in C++.
_TYPE_NAMES: dict[str, str] = {
    "F32": "float32",
    "F64": "float64",
    "BF16": "bfloat16",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
    "BOOL": "bool",
}
_BYTE_TOKENIZER = '{\n  "format_version": 1,\n  "kind": "bytes"\n}\n'


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """One safetensors file, whole or not at all; every tensor floating point and of one type."""
    seen: set[int] = set()
    out: dict[str, Tensor] = {}
    first = ""
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES.values():
            raise ValueError(
                f"{path}: tensor '{name}' is {tensor.dtype}, expected float32, float64, bfloat16 "
                f"or float16"
            )
        first = first or name
        if tensor.dtype != tensors[first].dtype:
            raise ValueError(
                f"{path}: tensor '{name}' is {tensor.dtype}, '{first}' is {tensors[first].dtype}: "
                f"expected one type for all"
            )
        if tensor.device.type == "meta":
            raise ValueError(f"{path}: tensor '{name}' is on the meta device: it has no values")
        value = tensor.detach().cpu().contiguous()
        # Two names may share memory in a model; in a file they are two tensors.
        out[name] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    try:
        write_atomically(path, lambda temporary: save_file(out, temporary, metadata))
    except SafetensorError as error:  # a full disk, say
        raise OSError(f"cannot write '{path}': {error}") from error


def save_model(model: Transformer, folder: str | os.PathLike[str], tokenizer: str | None) -> None:
    """See ``Transformer.save_pretrained``."""
    if tokenizer not in (None, "bytes"):
        raise ValueError(f"save_pretrained: tokenizer is {tokenizer!r}, expected 'bytes' or None")
    if tokenizer == "bytes" and model.config.vocab_size < 256:
        raise ValueError(
            f"save_pretrained: the tokenizer has 256 tokens, expected at most vocab_size "
            f"{model.config.vocab_size} of the config"
        )
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    # config.json last: a folder that has it is whole.
    save_tensors(place / WEIGHTS_FILE, model.state_dict(), {"format": "pt"})
    if tokenizer == "bytes":
        write_text(place / TOKENIZER_FILE, _BYTE_TOKENIZER)
    write_text(place / CONFIG_FILE, model.config.to_json())


def load_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """config.json of a folder, validated; errors begin with its path."""
    path = Path(folder) / CONFIG_FILE
    text = path.read_bytes()
    try:
        config = ModelConfig.from_json(text)
        config.validate()
    except (ValueError, NotImplementedError) as error:
        raise type(error)(f"{path}: {error}") from error
    return config


def load_tensors(path: Path, expected: dict[str, Tensor], because: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file, checked by name, shape and type before any is read.

    ``because`` says where the expected names and shapes come from: "config.json".
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file: expected the model's tensors")
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            shapes = {name: list(file.get_slice(name).get_shape()) for name in names}
            types = {name: file.get_slice(name).get_dtype() for name in names}
            _check_tensors(path, shapes, types, expected, because)
            # Copies: the file may be replaced while the model lives.
            return {name: file.get_tensor(name).clone() for name in names}
    except SafetensorError as error:
        raise ValueError(f"{path}: is not a safetensors file: {error}") from error


def _check_tensors(
    path: Path,
    shapes: dict[str, list[int]],
    types: dict[str, str],
    expected: dict[str, Tensor],
    because: str,
) -> None:
    spare = sorted(set(shapes) - set(expected))
    first = ""
    for name, tensor in expected.items():
        shape = list(tensor.shape)
        if name not in shapes:
            near = nearest_key(name, spare)
            hint = f"; the nearest found is '{near}'" if near else ""
            raise ValueError(
                f"{path}: tensor '{name}' is missing, expected with shape {shape} from {because}"
                f"{hint}"
            )
        if shapes[name] != shape:
            raise ValueError(
                f"{path}: tensor '{name}' has shape {shapes[name]}, expected {shape} from {because}"
            )
        found_type = _TYPE_NAMES.get(types[name], types[name])
        if types[name] not in _DTYPES:
            raise ValueError(
                f"{path}: tensor '{name}' is {found_type}, expected a floating-point type"
            )
        first = first or name
        if types[name] != types[first]:
            raise ValueError(
                f"{path}: tensor '{name}' is {found_type}, '{first}' is "
                f"{_TYPE_NAMES[types[first]]}: expected one type for all"
            )
    if spare:
        others = f" (nor are {len(spare) - 1} others)" if len(spare) > 1 else ""
        raise ValueError(
            f"{path}: tensor '{spare[0]}' with shape {shapes[spare[0]]} is not part of the model "
            f"that {because} describes{others}"
        )


def assign_tensors(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Makes checked tensors the parameters and buffers of a module built on the meta device."""
    module.load_state_dict(tensors, assign=True)


def load_model(
    model_class: type[_Model],
    folder: str | os.PathLike[str],
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> _Model:
    """See ``Transformer.from_pretrained``."""
    config = load_config(folder)
    with torch.device("meta"):  # nothing of the config's size is allocated before the check
        model = model_class(config)
    tensors = load_tensors(Path(folder) / WEIGHTS_FILE, model.state_dict(), CONFIG_FILE)
    assign_tensors(model, tensors)
    return model.to(device=device, dtype=dtype)
