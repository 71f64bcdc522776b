"""Check whether samples have as many tokens per image and recording as a model makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from pipeloom.spec.architecture import Architecture
from pipeloom.spec.batch import AUDIO_FRAMES_PER_TOKEN, Sample, audio_frames, audio_tokens

_SLACK = 0.1
"""Tolerated relative difference of tokens. Some processors add tokens to an image, such as line ends."""


def rows_per_token(architecture: Architecture, reads: Literal["images", "audio"]) -> int | None:
    """Return how many rows of an encoder (patches, frames) a model joins into one token.

    None if no module reads images (or recordings) and text.
    """
    if all(module.reads != "sequence" for module in architecture.modules):
        return None
    return next((module.joined for module in architecture.modules if module.reads == reads), None)


def fitted_images(architecture: Architecture, samples: Sequence[Sample]) -> list[Sample]:
    """Return samples with the model's number of tokens for the patches of each image."""
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
    """Yield a message for images or recordings of samples that differ from the model's, with the consequence."""
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
    # Frames and tokens both follow from the seconds of a recording, so the frames are right.
    tokens = sum(sum(audio_tokens(sample)) for sample in samples)
    frames = [count for sample in samples for count in audio_frames(sample)]
    more, less = _compared(rows_per_token(architecture, "audio"), frames, tokens)
    if more or less:
        yield (
            f"recordings are planned with {AUDIO_FRAMES_PER_TOKEN} frames a token, {architecture.name} joins "
            f"{rows_per_token(architecture, 'audio')}; the language model's times are too {'high' if more else 'low'}"
        )


def _compared(joined: int | None, rows: Sequence[int], tokens: int) -> tuple[bool, bool]:
    """Return whether there are more, and whether there are fewer tokens than the model makes of its encoder's rows."""
    if joined is None or not tokens:
        return False, False
    ratio = tokens / sum(-(-count // joined) for count in rows)
    return ratio > 1 + _SLACK, ratio < 1 - _SLACK
