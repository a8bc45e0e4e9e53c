"""Linear-time attention for PyTorch: the operators of libcosformer_torch as functions."""

from cosformer import _library

try:
    _library.load()
except ImportError:
    from cosformer import info

    info.exit_where_asked_for()
    raise

import torch  # noqa: E402

from cosformer._functions import (  # noqa: E402
    apply_rotary,
    cosformer_attention,
    linear_attention,
    linear_attention_decode_step_,
    linear_attention_with_denominator,
    sinusoidal_positions,
)
from cosformer._kv_cache import KvCache  # noqa: E402
from cosformer._matrix import attention_matrix  # noqa: E402
from cosformer._performer import (  # noqa: E402
    performer_attention,
    performer_attention_decode_step_,
    performer_projection,
)
from cosformer._softmax import (  # noqa: E402
    bigbird_attention,
    bigbird_block_mask,
    linformer_attention,
    longformer_attention,
    softmax_attention,
    softmax_attention_decode_step_,
    t5_relative_bias,
)
from cosformer._state import LinearState  # noqa: E402
from cosformer.integrations.transformers import register_transformers  # noqa: E402

from cosformer import nn  # noqa: E402  isort: skip
from cosformer._replace import replace_attention  # noqa: E402  isort: skip
from cosformer.models import (  # noqa: E402  isort: skip
    AttentionConfig,
    Hypothesis,
    ModelConfig,
    ModelState,
    Transformer,
    TransformerForClassification,
    beam_search,
    generate,
    generate_stream,
)

__version__: str = torch.ops.cosformer.version()


def isa() -> str:
    """The instruction set that the kernels use: "amx", "avx512", "avx2" or "generic".

    Example:
        >>> import cosformer
        >>> cosformer.isa() in ("amx", "avx512", "avx2", "generic")
        True
    """
    return torch.ops.cosformer.isa()


__all__ = [
    "AttentionConfig",
    "Hypothesis",
    "KvCache",
    "LinearState",
    "ModelConfig",
    "ModelState",
    "Transformer",
    "TransformerForClassification",
    "apply_rotary",
    "attention_matrix",
    "beam_search",
    "bigbird_attention",
    "bigbird_block_mask",
    "cosformer_attention",
    "generate",
    "generate_stream",
    "isa",
    "linear_attention",
    "linear_attention_decode_step_",
    "linear_attention_with_denominator",
    "linformer_attention",
    "longformer_attention",
    "nn",
    "performer_attention",
    "performer_attention_decode_step_",
    "performer_projection",
    "register_transformers",
    "replace_attention",
    "sinusoidal_positions",
    "softmax_attention",
    "softmax_attention_decode_step_",
    "t5_relative_bias",
]
