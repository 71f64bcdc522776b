"""Generate videos for held-out captions, and check whether they match the captions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from . import data, model
from .data import DIGIT, SIDE, Clip

STEPS = 16
CLIPS_PER_GROUP = 12


def part_of(clips: Sequence[Clip]) -> SimpleNamespace:
    """Clips as one microbatch."""
    return SimpleNamespace(samples=tuple(clips), instances=tuple((i, 0) for i in range(len(clips))))


def run(layers: Sequence[nn.Module], *inputs: Tensor, **context: Tensor) -> Tensor:
    """Call layers one after the other."""
    x: Tensor = layers[0](*inputs, **context)
    for layer in layers[1:]:
        x = layer(x, **context)
    return x


@torch.no_grad()
def held_out_loss(text: Sequence[nn.Module], video: Sequence[nn.Module], clips: Sequence[Clip]) -> float:
    """Return the training loss on held-out clips."""
    total, dtype = 0.0, next(video[0].parameters()).dtype
    for first in range(0, len(clips), CLIPS_PER_GROUP):
        part = part_of(clips[first : first + CLIPS_PER_GROUP])
        captions = run(text, *model.text_inputs(part), **model.text_context(part))
        context = model.video_context(part, dtype)
        output = run(video, *model.video_inputs(part, dtype), captions, **context)
        total += float(model.loss(output, part))
    return total / sum(map(model.num_targets, clips))


@torch.no_grad()
def generate(text: Sequence[nn.Module], video: Sequence[nn.Module], clips: Sequence[Clip]) -> list[Tensor]:
    """Generate a video, ``(frames, SIDE, SIDE)``, from noise for the caption of each clip."""
    made: list[Tensor] = []
    dtype = next(video[0].parameters()).dtype
    for first in range(0, len(clips), CLIPS_PER_GROUP):
        group = clips[first : first + CLIPS_PER_GROUP]
        part = part_of(group)
        captions = run(text, *model.text_inputs(part), **model.text_context(part))
        sizes = [clip.num_tokens for clip in group]
        context, places = model.video_context(part, dtype), model.places_of(sizes)
        x = torch.cat([model.noise_of(clip)[1] for clip in group]).to(dtype)
        for step in range(STEPS, 0, -1):
            context["time"] = model.waves(torch.full((len(group),), step / STEPS)).to(dtype)
            # Move toward the prediction by one of the remaining steps.
            x = x + (run(video, x, places, captions, **context) - x) / step
        made += [data.frames_of(piece) for piece in x.float().split(sizes)]
    return made


@functools.cache
def classifier() -> LogisticRegression:
    """Return a digit classifier, fitted on the undistorted training images."""
    pixels, labels = data.digits()
    rows = data.split()[0]
    return LogisticRegression(max_iter=300, C=0.3).fit(pixels[rows].reshape(len(rows), -1), labels[rows])


def read(frames: Tensor, clip: Clip) -> int:
    """Return the most likely digit at the positions that the caption implies, over all frames together."""
    scores = np.zeros(10)
    for number, frame in enumerate(frames.clamp(0, 1)):
        row, column = data.offsets(clip.direction, clip.speed, number)
        window = frame[row : row + DIGIT, column : column + DIGIT]
        scores += classifier().predict_log_proba(window.reshape(1, -1).numpy())[0]
    return int(scores.argmax())


def motion(frames: Tensor) -> int:
    """Return the direction in which the center of mass moves from the first frame to the last."""
    ink = frames.clamp(0, 1)
    mass = ink.sum((1, 2)).clamp(min=1e-6)
    places = torch.arange(SIDE, dtype=torch.float32)
    rows, columns = (ink.sum(2) @ places) / mass, (ink.sum(1) @ places) / mass
    down, right = float(rows[-1] - rows[0]), float(columns[-1] - columns[0])
    if abs(right) >= abs(down):
        return 1 if right > 0 else 0
    return 3 if down > 0 else 2


def evaluate(text: Sequence[nn.Module], video: Sequence[nn.Module], num_clips: int = 120) -> dict[str, float]:
    """Score generated videos for held-out captions.

    Returns
    -------
    dict[str, float]
        ``held_out_loss``; ``digit_match`` and ``direction_match``, the fractions of generated videos with the digit and
        the direction of their captions; ``digit_match_real``, the accuracy of the digit classifier on real held-out
        videos, which is an upper limit. Random guesses give 0.1 and 0.25.
    """
    clips = data.held_out(num_clips)
    made = generate(text, video, clips)
    real = [data.frames_of(data.video(clip)) for clip in clips]
    share = 1 / len(clips)
    return {
        "held_out_loss": held_out_loss(text, video, clips),
        "digit_match": share * sum(read(frames, clip) == clip.label for frames, clip in zip(made, clips, strict=True)),
        "direction_match": share * sum(motion(f) == clip.direction for f, clip in zip(made, clips, strict=True)),
        "digit_match_real": share
        * sum(read(frames, clip) == clip.label for frames, clip in zip(real, clips, strict=True)),
    }
