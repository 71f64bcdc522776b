"""Whether the tokens and patches of images are those that a model makes of an image."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pipeloom.spec.architecture import Architecture
from pipeloom.spec.batch import Sample

_SLACK = 0.1
"""Share by which tokens may differ: some processors add tokens to an image, such as the ends of its lines."""


def patches_per_token(architecture: Architecture) -> int | None:
    """Return how many patches of an image a model joins into a token; None: no module reads images and text."""
    if all(module.reads != "sequence" for module in architecture.modules):
        return None
    return next((module.joined for module in architecture.modules if module.reads == "images"), None)


def fitted_images(architecture: Architecture, samples: Sequence[Sample]) -> list[Sample]:
    """Return samples whose images have as many tokens as the model makes of their patches."""
    joined = patches_per_token(architecture)
    if joined is None:
        return list(samples)
    return [
        msgspec.structs.replace(sample, image_tokens=tuple(-(-patches // joined) for patches in sample.patches))
        if sample.image_tokens
        else sample
        for sample in samples
    ]


def image_disagreement(architecture: Architecture, samples: Sequence[Sample]) -> str:
    """Say how the images of samples differ from those of a model, and what is wrong then; empty: they do not."""
    joined = patches_per_token(architecture)
    tokens = sum(sum(sample.image_tokens) for sample in samples)
    patches = sum(sum(sample.patches) for sample in samples)
    if joined is None or not tokens or abs(joined * tokens / patches - 1) <= _SLACK:
        return ""
    wrong = (
        "either the encoder's times are too low or the language model's too high"
        if patches < joined * tokens
        else "either the encoder's times are too high or the language model's too low"
    )
    cause = "" if any(sample.image_patches for sample in samples) else " (image_patches is missing)"
    return (
        f"images of the data have {patches / tokens:.3g} patches a token{cause}, {architecture.name} joins {joined}; "
        f"{wrong}"
    )
