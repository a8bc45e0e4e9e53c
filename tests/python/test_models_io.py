"""Model folders: what is written, and what is said about what cannot be read."""

import json
import os
import subprocess
import sys

import cosformer
import pytest
import torch
from conftest import ROOT
from cosformer.models import Transformer, TransformerForClassification
from helpers import relative
from model_helpers import CAUSAL, small_config
from safetensors.torch import load_file, save_file


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(1)
    Transformer(small_config(tie_embeddings=False)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def same_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_folder_gives_the_same_bits(tmp_path, dtype):
    for name in ("every_kind_a_layer", "performer_rope_trainable", "sinusoidal_offset"):
        model = Transformer(CAUSAL[name]).to(dtype).eval()
        model.save_pretrained(tmp_path / name)
        torch.manual_seed(77)
        random = torch.get_rng_state()
        back = Transformer.from_pretrained(tmp_path / name)
        assert torch.equal(torch.get_rng_state(), random)  # nothing is drawn
        same_bits(model.state_dict(), back.state_dict())
        assert back.training and back.config == model.config
        assert all(p.requires_grad for p in back.parameters())
        ids = torch.randint(11, (2, 9))
        assert torch.equal(back.eval()(ids), model(ids))


def test_another_type_and_device(folder):
    model = Transformer.from_pretrained(folder, dtype=torch.float64)
    assert model.embed.weight.dtype == torch.float64
    assert torch.equal(
        model.embed.weight.float(), load_file(folder / "model.safetensors")["embed.weight"]
    )
    assert Transformer.from_pretrained(folder, device="meta").embed.weight.is_meta


def test_what_is_written(folder):
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert oct((folder / "config.json").stat().st_mode)[-3:] == oct(0o666 & ~_umask())[-3:]
    model = Transformer.from_pretrained(folder)
    same_bits(load_file(folder / "model.safetensors"), dict(model.state_dict()))
    with pytest.raises(ValueError, match="256 tokens, expected at most vocab_size 11"):
        model.save_pretrained(folder, tokenizer="bytes")
    with pytest.raises(ValueError, match="tokenizer is 'words', expected 'bytes' or None"):
        model.save_pretrained(folder, tokenizer="words")


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_shared_memory_is_two_tensors_in_the_file(tmp_path):
    model = Transformer(small_config(tie_embeddings=False))
    model.head.weight = model.embed.weight
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(saved["head.weight"], saved["embed.weight"])


def test_loaded_tensors_are_their_own(folder):
    """A file that is written over changes no model."""
    model = Transformer.from_pretrained(folder)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    same_bits(dict(model.state_dict()), before)


def test_an_error_leaves_no_temporary(folder):
    model = Transformer.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    before = sorted(folder.iterdir())
    with pytest.raises(IsADirectoryError):
        model.save_pretrained(folder)
    assert sorted(folder.iterdir()) == before


def test_an_interrupted_save_leaves_the_old_folder(folder):
    """A file size limit stops the write half way, as a full disk would."""
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    script = f"""
import resource, signal, torch, cosformer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
model = cosformer.Transformer.from_pretrained({str(folder)!r})
with torch.no_grad():
    model.embed.weight.zero_()
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    model.save_pretrained({str(folder)!r})
except OSError as error:
    print(error)
"""
    path = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and "File too large" in run.stdout, run.stderr
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def change_config(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


BAD_TENSORS = {
    "missing": (
        lambda t: t.pop("final_norm.bias"),
        r"tensor 'final_norm.bias' is missing, expected with shape \[16\] from config.json",
    ),
    "misnamed": (
        lambda t: t.update({"head.weights": t.pop("head.weight")}),
        r"'head.weight' is missing, .*; the nearest found is 'head.weights'",
    ),
    "extra": (
        lambda t: t.update(more=torch.ones(2)),
        r"tensor 'more' with shape \[2\] is not part of the model that config.json describes",
    ),
    "misshapen": (
        lambda t: t.update({"embed.weight": torch.ones(11, 15)}),
        r"tensor 'embed.weight' has shape \[11, 15\], expected \[11, 16\] from config.json",
    ),
    "integers": (
        lambda t: t.update({"embed.weight": torch.ones(11, 16, dtype=torch.int32)}),
        "'embed.weight' is int32, expected a floating-point type",
    ),
    "mixed types": (
        lambda t: t.update({"head.weight": torch.ones(11, 16, dtype=torch.float64)}),
        "'head.weight' is float64, 'embed.weight' is float32: expected one type for all",
    ),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_behaviour_39_load_errors_state_expected_found_and_which(folder, name):
    change, message = BAD_TENSORS[name]
    change_tensors(folder, change)
    with pytest.raises(ValueError, match=message) as caught:
        Transformer.from_pretrained(folder)
    assert str(caught.value).startswith(str(folder / "model.safetensors"))


def test_behaviour_39_broken_files_are_errors(folder):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for broken in (b"", whole[:7], whole[:100], whole[:-1], whole + b"x", b"\xff" * 100):
        weights.write_bytes(broken)
        with pytest.raises(ValueError, match="model.safetensors: is not a safetensors file"):
            Transformer.from_pretrained(folder)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        Transformer.from_pretrained(folder)
    change_config(folder, lambda c: c.update(emed_dim=3))
    with pytest.raises(
        ValueError, match="config.json: unknown key 'emed_dim'; did you mean 'embed_dim'"
    ):
        Transformer.from_pretrained(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json"):
        Transformer.from_pretrained(folder)


def test_a_hostile_config_allocates_nothing(folder):
    def grow(config):
        config.update(vocab_size=1 << 31, embed_dim=1 << 20, max_len=1 << 31)
        config["attention"]["reweight_len"] = 1 << 31

    change_config(folder, grow)
    with pytest.raises(
        ValueError, match=r"'embed.weight' has shape \[11, 16\], expected \[2147483648"
    ):
        Transformer.from_pretrained(folder)


def test_what_cannot_be_saved(tmp_path):
    with torch.device("meta"):
        model = Transformer(small_config())
    with pytest.raises(ValueError, match="meta device: it has no values"):
        model.save_pretrained(tmp_path)
    model = Transformer(small_config())
    model.final_norm.double()
    with pytest.raises(ValueError, match="expected one type for all"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


class TestClassification:
    @pytest.mark.parametrize("pooling", ["mean", "first", "last"])
    def test_behaviour_13_padding_changes_nothing(self, pooling):
        config = small_config(["softmax", "linear"], is_causal=False, position="none")
        model = TransformerForClassification(config, 3, pooling=pooling).double().eval()
        ids = torch.randint(11, (3, 8))
        lengths = [8, 3, 1]
        mask = torch.arange(8) < torch.tensor(lengths)[:, None]
        found = model(ids, key_mask=mask)
        for row, count in enumerate(lengths):
            alone = model(ids[row : row + 1, :count])
            assert relative(found[row : row + 1], alone) < 1e-12
        left = model(ids.flip(1), key_mask=mask.flip(1))  # padding on the left
        for row, count in enumerate(lengths):
            alone = model(ids.flip(1)[row : row + 1, 8 - count :])
            assert relative(left[row : row + 1], alone) < 1e-12

    def test_behaviour_8_what_padding_holds_changes_no_bit(self):
        config = small_config("linear", is_causal=False, position="none")
        for pooling in ("mean", "first", "last"):
            model = TransformerForClassification(config, 3, pooling=pooling)
            mask = torch.tensor([[True, True, False, False], [False, True, True, True]])
            ids = torch.where(mask, torch.randint(10, (2, 4)), 10)
            expected = model(ids, key_mask=mask)
            with torch.no_grad():
                model.transformer.embed.weight[10] = float("nan")
            assert torch.equal(model(ids, key_mask=mask), expected)

    def test_a_row_of_padding_is_pooled_to_0(self):
        for pooling in ("mean", "first", "last"):
            model = TransformerForClassification(small_config(is_causal=False), 3, pooling=pooling)
            torch.nn.init.ones_(model.classifier.bias)
            mask = torch.tensor([[False] * 4, [True] * 4])
            out = model(torch.zeros(2, 4, dtype=torch.int64), key_mask=mask)
            assert torch.equal(out[0], torch.ones(3))
            out[0].sum().backward()
            grads = [p.grad for p in model.transformer.parameters()]
            assert all(g is None or not g.any() for g in grads)

    def test_is_saved_whole(self, tmp_path):
        model = TransformerForClassification(
            small_config("linear", is_causal=False), 2, pooling="last"
        )
        model.save_pretrained(tmp_path)
        back = TransformerForClassification.from_pretrained(tmp_path)
        same_bits(model.state_dict(), back.state_dict())
        assert back.pooling == "last" and back.num_classes == 2
        # The trunk alone is a language model's folder, as C++ reads it.
        trunk = Transformer.from_pretrained(tmp_path)
        same_bits(trunk.state_dict(), model.transformer.state_dict())
        (tmp_path / "classifier.safetensors").unlink()
        with pytest.raises(FileNotFoundError, match="no classification head"):
            TransformerForClassification.from_pretrained(tmp_path)

    def test_errors(self, tmp_path):
        with pytest.raises(ValueError, match="num_classes is 0"):
            TransformerForClassification(small_config(), 0)
        with pytest.raises(ValueError, match="pooling is 'max'"):
            TransformerForClassification(small_config(), 2, pooling="max")
        model = TransformerForClassification(small_config(), 2)
        model.save_pretrained(tmp_path)
        save_file({"weight": torch.ones(2, 16)}, tmp_path / "classifier.safetensors")
        with pytest.raises(ValueError, match="classifier.safetensors: metadata has num_classes ''"):
            TransformerForClassification.from_pretrained(tmp_path)
        save_file(
            {"weight": torch.ones(2, 16)},
            tmp_path / "classifier.safetensors",
            {"num_classes": "2", "pooling": "mean"},
        )
        with pytest.raises(
            ValueError, match=r"tensor 'bias' is missing, expected with shape \[2\]"
        ):
            TransformerForClassification.from_pretrained(tmp_path)


def test_the_package_exports_the_models():
    assert cosformer.Transformer is Transformer


def test_the_documented_code_runs(tmp_path, monkeypatch):
    text = (ROOT / "docs" / "model-folder.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(code, "model-folder.md", "exec"), names)
    assert names["tokens"].shape == (2, 20) and len(names["best"].tokens) == 20
