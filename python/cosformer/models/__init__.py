"""Models: one generic Transformer by its config, saved and loaded as a model folder that the C++
library and the program read too, and text generation with it."""

from cosformer.models.beams import Hypothesis, beam_search
from cosformer.models.classification import TransformerForClassification
from cosformer.models.config import AttentionConfig, ModelConfig
from cosformer.models.generation import generate, generate_stream
from cosformer.models.state import ModelState
from cosformer.models.transformer import Transformer

__all__ = [
    "AttentionConfig",
    "Hypothesis",
    "ModelConfig",
    "ModelState",
    "Transformer",
    "TransformerForClassification",
    "beam_search",
    "generate",
    "generate_stream",
]
