"""Models: one generic Transformer by its config, saved and loaded as a model folder that the C++
library and the program read too, and text generation with it."""

from cosformer.models.config import AttentionConfig, ModelConfig

__all__ = ["AttentionConfig", "ModelConfig"]
