"""Modules: models described as in PyTorch, composed of operators.

A module is called on symbolic tensors and records operators on their tape. It holds sizes, never numbers. To write one,
subclass `Module` and compose others in ``__call__``.
"""

from pipeloom.emulator.modules.ends import (
    AudioEmbedding,
    DenoisingHead,
    LanguageHead,
    PatchEmbedding,
    PatchMerger,
    Prediction,
    Projector,
    TokenEmbedding,
)
from pipeloom.emulator.modules.feed_forward import MLP, MixtureOfExperts
from pipeloom.emulator.modules.mixing import Attention, CrossAttention, LatentAttention, Mamba2
from pipeloom.emulator.modules.plain import (
    Activation,
    Average,
    Emitting,
    Join,
    Linear,
    Modulated,
    Module,
    Norm,
    Residual,
    Scaled,
    Sequential,
    Taking,
    Vectors,
)
from pipeloom.emulator.modules.traced import Traced

__all__ = [
    "MLP",
    "Activation",
    "Attention",
    "AudioEmbedding",
    "Average",
    "CrossAttention",
    "DenoisingHead",
    "Emitting",
    "Join",
    "LanguageHead",
    "LatentAttention",
    "Linear",
    "Mamba2",
    "MixtureOfExperts",
    "Modulated",
    "Module",
    "Norm",
    "PatchEmbedding",
    "PatchMerger",
    "Prediction",
    "Projector",
    "Residual",
    "Scaled",
    "Sequential",
    "Taking",
    "TokenEmbedding",
    "Traced",
    "Vectors",
]
