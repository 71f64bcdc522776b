"""Captions and videos of moving handwritten digits.

A video has 2 to 6 frames of 12 x 12 pixels. One of scikit-learn's 8 x 8 digits starts at one side and moves to the
other by one or two pixels per frame::

    the old film shows a seven that slowly moves left
    quickly up goes one small three

Batch ``i`` depends only on ``(seed, i)``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_NAME_WORDS = "zero one two three four five six seven eight nine"
_FILLER_WORDS = "the a an old new small film clip shows where that moves goes one can see plain grey and then"
NAMES = _NAME_WORDS.split()
DIRECTIONS = ("left", "right", "up", "down")
SPEEDS = ("slowly", "quickly")
FILLERS = _FILLER_WORDS.split()
VOCABULARY = (*NAMES, *DIRECTIONS, *SPEEDS, *FILLERS)
FIRST_DIRECTION, FIRST_SPEED, FIRST_FILLER = (VOCABULARY.index(word) for word in ("left", "slowly", FILLERS[0]))

SIDE, DIGIT, PATCH = 12, 8, 3
PATCHES_PER_FRAME = (SIDE // PATCH) ** 2
PIXELS = PATCH * PATCH
MIN_FRAMES, MAX_FRAMES = 2, 6
NUM_HELD_OUT = 300
# With these values, pixels have a mean of about 0 and a standard deviation of about 1.
MEAN, SCALE = 0.14, 0.3


@dataclass(frozen=True)
class Clip:
    """One sample: a caption, its meaning, and the seed of the noise.

    Attributes
    ----------
    caption : tuple of int
        Token ids.
    image : int
        Row of the image in scikit-learn's digits.
    label, direction, speed : int
        Meaning of the caption.
    seed : int
        Seed of the noise and of the time between video and noise.
    """

    identifier: str
    caption: tuple[int, ...]
    image: int
    label: int
    direction: int
    speed: int
    num_frames: int
    seed: int

    @property
    def num_tokens(self) -> int:
        """Number of patches of all frames."""
        return self.num_frames * PATCHES_PER_FRAME


@functools.cache
def digits() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return pixels, ``(1797, 8, 8)`` between 0 and 1, and labels."""
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    # Read the file of `load_digits` directly, because importing scikit-learn takes seconds in each process.
    rows = np.loadtxt(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return (rows[:, :-1].reshape(-1, 8, 8) / 16.0).astype(np.float32), rows[:, -1].astype(np.int64)


@functools.cache
def split() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the rows of the training images and of the held-out images."""
    order = np.random.default_rng(31).permutation(len(digits()[1]))
    return order[NUM_HELD_OUT:], order[:NUM_HELD_OUT]


def offsets(direction: int, speed: int, frame: int) -> tuple[int, int]:
    """Return row and column of the digit's upper left corner in a frame."""
    most = SIDE - DIGIT
    way = min(most, frame * (speed + 1))
    middle = most // 2
    return [(middle, most - way), (middle, way), (most - way, middle), (way, middle)][direction]


def video(clip: Clip) -> Tensor:
    """Return the normalized patches of all frames, ``(num_tokens, PIXELS)``."""
    frames = torch.zeros(clip.num_frames, SIDE, SIDE)
    image = torch.from_numpy(digits()[0][clip.image])
    for number in range(clip.num_frames):
        row, column = offsets(clip.direction, clip.speed, number)
        frames[number, row : row + DIGIT, column : column + DIGIT] = image
    cut = frames.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
    return (cut.reshape(-1, PIXELS) - MEAN) / SCALE


def frames_of(patches: Tensor) -> Tensor:
    """Invert `video`: return frames, ``(num_frames, SIDE, SIDE)``. Pixels of real videos are between 0 and 1."""
    across = SIDE // PATCH
    grid = patches.view(-1, across, across, PATCH, PATCH).transpose(2, 3)
    return grid.reshape(-1, SIDE, SIDE) * SCALE + MEAN


def draw(identifier: str, rng: np.random.Generator, rows: npt.NDArray[np.int64], mean_frames: float) -> Clip:
    """Draw one sample."""
    image = int(rng.choice(rows))
    label = int(digits()[1][image])
    direction, speed = int(rng.integers(len(DIRECTIONS))), int(rng.integers(len(SPEEDS)))
    said = [label, FIRST_DIRECTION + direction, FIRST_SPEED + speed]
    words = [said[place] for place in rng.permutation(3)]
    for _ in range(int(rng.integers(2, 9))):
        words.insert(int(rng.integers(len(words) + 1)), FIRST_FILLER + int(rng.integers(len(FILLERS))))
    frames = int(np.clip(rng.poisson(mean_frames), MIN_FRAMES, MAX_FRAMES))
    seed = int(rng.integers(2**31))
    return Clip(identifier, tuple(words), image, label, direction, speed, frames, seed)


def batch(seed: int, iteration: int, clips_per_batch: int) -> list[Clip]:
    """Return the clips of one iteration. Their mean length is drawn for each batch."""
    rng = np.random.default_rng((seed, iteration))
    mean = float(rng.uniform(2.0, 5.0))
    return [draw(f"{iteration}-{number}", rng, split()[0], mean) for number in range(clips_per_batch)]


def batches(seed: int, num_iterations: int, clips_per_batch: int, start: int = 0) -> Iterator[list[Clip]]:
    """Yield the batches of the iterations from ``start`` to ``num_iterations``."""
    for iteration in range(start, num_iterations):
        yield batch(seed, iteration, clips_per_batch)


def held_out(num_clips: int, seed: int = 99) -> Sequence[Clip]:
    """Return clips with images that are in no training batch."""
    rng = np.random.default_rng((seed, 10**6, 7))
    return [draw(f"held-out-{number}", rng, split()[1], 4.0) for number in range(num_clips)]


def describe(clip: Clip) -> dict[str, object]:
    """Return the sizes of a clip for the planner, where a token is half a second of 16 x 16 pixels."""
    side = 16 * (SIDE // PATCH)
    return {
        "id": clip.identifier,
        "text_tokens": len(clip.caption),
        "video_seconds": [clip.num_frames / 2],
        "video_height": [side],
        "video_width": [side],
    }
