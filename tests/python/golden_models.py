"""Tiny checkpoints in the layout of transformers as models of ours."""

import json

from cosformer.models import ModelConfig, Transformer
from helpers import GOLDEN
from safetensors.torch import load_file

MODELS = GOLDEN / "models"


def llama(config):
    ours = ModelConfig(
        vocab_size=config["vocab_size"],
        embed_dim=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        ffn_dim=config["intermediate_size"],
        max_len=config["max_position_embeddings"],
        norm="rmsnorm",
        norm_eps=config["rms_norm_eps"],
        activation=config["hidden_act"],
        gated=True,
        position="rope",
        rope_base=config["rope_parameters"]["rope_theta"],
        attention="softmax",
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        tie_embeddings=config["tie_word_embeddings"],
    )
    names = {
        "lm_head": "head",
        "model.": "",
        "embed_tokens": "embed",
        "self_attn.o_proj": "self_attn.out_proj",
        "self_attn": "attention",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp": "ffn",
    }

    def renamed(name):
        for theirs, our in names.items():
            name = name.replace(theirs, our)
        return "final_norm.weight" if name == "norm.weight" else name

    return ours, lambda tensors: {renamed(name): value for name, value in tensors.items()}


def gpt2(config):
    ours = ModelConfig(
        vocab_size=config["vocab_size"],
        embed_dim=config["n_embd"],
        num_layers=config["n_layer"],
        num_heads=config["n_head"],
        max_len=config["n_positions"],
        norm_eps=config["layer_norm_epsilon"],
        activation="gelu_tanh",  # gelu_new
        attention="softmax",
    )
    names = {
        "transformer.": "",
        "wte": "embed",
        "wpe": "position",
        "h.": "layers.",
        "attn.c_proj": "attention.out_proj",
        "ln_1": "attention_norm",
        "ln_2": "ffn_norm",
        "ln_f": "final_norm",
        "mlp.c_fc": "ffn.up_proj",
        "mlp.c_proj": "ffn.down_proj",
    }

    def convert(tensors):
        out = {}
        for name, value in tensors.items():
            is_matrix = ".c_" in name and name.endswith("weight")
            for theirs, our in names.items():
                name = name.replace(theirs, our)
            value = value.T if is_matrix else value  # Conv1D has [in, out]
            if "attn.c_attn" not in name:
                out[name] = value
                continue
            for part, piece in zip("qkv", value.chunk(3), strict=True):
                out[name.replace("attn.c_attn", f"attention.{part}_proj")] = piece
        return out

    return ours, convert


#: The checkpoints of tests/golden/models that the generic Transformer can be.
MAPPINGS = {"llama": llama, "gpt2": gpt2}


def golden_model(name):
    """A checkpoint's model, float32."""
    folder = MODELS / name
    config, convert = MAPPINGS[name](json.loads((folder / "config.json").read_text()))
    model = Transformer(config).eval()
    model.load_state_dict(convert(load_file(folder / "model.safetensors")))
    return model


def golden_values(name):
    """What transformers computes: input_ids, logits."""
    return load_file(MODELS / name / "golden.safetensors")
