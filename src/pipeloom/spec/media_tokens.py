"""Whether the tokens of images and recordings are those that a model makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from pipeloom.spec.architecture import Architecture
from pipeloom.spec.batch import AUDIO_FRAMES_PER_TOKEN, Sample, audio_frames, audio_tokens

_SLACK = 0.1
"""Share by which tokens may differ: some processors add tokens to an image, such as the ends of its lines."""


def rows_per_token(architecture: Architecture, reads: Literal["images", "audio"]) -> int | None:
    """Return how many rows of an encoder (patches, frames) a model joins into a token.

    None: no module reads images (or recordings) and text.
    """
    if all(module.reads != "sequence" for module in architecture.modules):
        return None
    return next((module.joined for module in architecture.modules if module.reads == reads), None)


def fitted_images(architecture: Architecture, samples: Sequence[Sample]) -> list[Sample]:
    """Return samples whose images have as many tokens as the model makes of their patches."""
    joined = rows_per_token(architecture, "images")
    if joined is None:
        return list(samples)
    return [
        msgspec.structs.replace(sample, image_tokens=tuple(-(-patches // joined) for patches in sample.patches))
        if sample.image_tokens
        else sample
        for sample in samples
    ]


def disagreements(architecture: Architecture, samples: Sequence[Sample]) -> Iterator[str]:
    """Say how images and recordings of samples differ from those of a model, and what is wrong then."""
    tokens = sum(sum(sample.image_tokens) for sample in samples)
    patches = [count for sample in samples for count in sample.patches]
    more, less = _compared(rows_per_token(architecture, "images"), patches, tokens)
    if more or less:
        cause = "" if any(sample.image_patches for sample in samples) else " (image_patches is missing)"
        encoder, lm = ("low", "high") if more else ("high", "low")
        yield (
            f"images of the data have {sum(patches) / tokens:.3g} patches a token{cause}, {architecture.name} joins "
            f"{rows_per_token(architecture, 'images')}; either the encoder's times are too {encoder} or the language "
            f"model's too {lm}"
        )
    # Both follow from the seconds of a recording; so its frames are right.
    tokens = sum(sum(audio_tokens(sample)) for sample in samples)
    frames = [count for sample in samples for count in audio_frames(sample)]
    more, less = _compared(rows_per_token(architecture, "audio"), frames, tokens)
    if more or less:
        yield (
            f"recordings are planned with {AUDIO_FRAMES_PER_TOKEN} frames a token, {architecture.name} joins "
            f"{rows_per_token(architecture, 'audio')}; the language model's times are too {'high' if more else 'low'}"
        )


def _compared(joined: int | None, rows: Sequence[int], tokens: int) -> tuple[bool, bool]:
    """Whether there are more tokens than a model makes of its encoder's rows, and whether there are fewer."""
    if joined is None or not tokens:
        return False, False
    ratio = tokens / sum(-(-count // joined) for count in rows)
    return ratio > 1 + _SLACK, ratio < 1 - _SLACK
