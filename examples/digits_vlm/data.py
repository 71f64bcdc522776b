"""Documents with images of handwritten digits.

A document has a short title and one line per item. In a document with images, each line contains an image of a digit.
In a text-only document, each line contains the name of a digit. The marker ``ANSWER`` is followed by the digits in
order and the marker ``END``::

    the old note . page of <image> . her ink <image> . ANSWER 7 2 END
    a short list . three and . two small . ANSWER 3 2 END

Batch ``i`` depends only on ``(seed, i)``. So every process can produce it, and training can resume at any iteration.
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
from torch.nn import functional

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

# --------------------------------------------------------------- vocabulary
_FILLER_WORDS = (
    "the a an old new short long small note list page letter book ink pen hand line sheet box "
    "of in on and with by for her his their plain red blue green dark first last here there then"
)
_NAME_WORDS = "zero one two three four five six seven eight nine"
FILLERS = _FILLER_WORDS.split()
NAMES = _NAME_WORDS.split()
SPECIALS = ("<image>", "ANSWER", "END", ".")
VOCABULARY: tuple[str, ...] = (*"0123456789", *SPECIALS, *NAMES, *FILLERS)
TOKEN_IDS = {word: index for index, word in enumerate(VOCABULARY)}
# The ids of the digits are the digits themselves: VOCABULARY[7] == "7".
IMAGE, ANSWER, END, STOP = (TOKEN_IDS[word] for word in SPECIALS)
FIRST_NAME = TOKEN_IDS[NAMES[0]]
FIRST_FILLER = TOKEN_IDS[FILLERS[0]]

# ------------------------------------------------------------------- shapes
IMAGE_SIDE = 8
PATCHES_PER_IMAGE = 16
"""Overlapping patches of 4x4 pixels with a stride of 2 pixels."""
PIXELS_PER_PATCH = 16
TOKENS_PER_IMAGE = 1
MAX_LINES = 12

# ------------------------------------------------------------------- images
NUM_HELD_OUT = 360
NUM_VARIANTS = 32
"""Distorted variants of each training image."""

# The mean number of images per document is drawn for each batch from a log-normal distribution, so that batches differ
# widely. With these values the mean over all documents is three, after the limit of MAX_LINES.
INTENSITY_MEDIAN = 2.6
INTENSITY_SIGMA = 0.9


@dataclass(frozen=True)
class Image:
    """A reference to an image.

    Attributes
    ----------
    index
        Row of the image in scikit-learn's digits.
    variant
        Number of the distorted variant, or -1 for the original image.
    """

    index: int
    variant: int


@dataclass(frozen=True)
class Document:
    """One sample.

    Attributes
    ----------
    identifier
        Name of the document, unique in a run.
    prompt
        Token ids up to and including ``ANSWER``. Each image has ``TOKENS_PER_IMAGE`` ids ``IMAGE``.
    prompt_lines
        Line of each token of the prompt: 0 for the title, then 1, 2, ... ``ANSWER`` has 1, because the digit of line 1
        comes next.
    images
        Images in the order of their placeholders.
    digits
        The answer.
    """

    identifier: str
    prompt: tuple[int, ...]
    prompt_lines: tuple[int, ...]
    images: tuple[Image, ...]
    digits: tuple[int, ...]

    @property
    def inputs(self) -> tuple[int, ...]:
        """Token ids of prompt and digits, which the language model reads."""
        return (*self.prompt, *self.digits)

    @property
    def lines(self) -> tuple[int, ...]:
        """Line of each input. A digit has the line of the digit that follows it."""
        return (*self.prompt_lines, *range(2, len(self.digits) + 2))

    @property
    def targets(self) -> tuple[int, ...]:
        """Targets of the inputs from ``ANSWER`` on."""
        return (*self.digits, END)

    @property
    def text(self) -> str:
        """The document as text."""
        words = [VOCABULARY[token] for token in (*self.inputs, END)]
        return " ".join(words)


@functools.cache
def _digits() -> tuple[FloatArray, IntArray]:
    """Return pixels, ``(1797, 8, 8)`` between 0 and 1, and labels."""
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    # Read the file of `load_digits` directly, because importing scikit-learn takes seconds in each process.
    rows = np.loadtxt(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return (rows[:, :-1].reshape(-1, 8, 8) / 16.0).astype(np.float32), rows[:, -1].astype(np.int64)


@functools.cache
def split() -> tuple[IntArray, IntArray]:
    """Return the rows of the training images and of the held-out images."""
    order = np.random.default_rng(20240517).permutation(len(_digits()[1]))
    return order[NUM_HELD_OUT:], order[:NUM_HELD_OUT]


@functools.cache
def _pool() -> torch.Tensor:
    """Return variants of all images, ``(NUM_VARIANTS + 1, images, 8, 8)``.

    The last variant is the original images. The others are slightly rotated, scaled, sheared and shifted. They are
    computed once, because computing them in each iteration is slow.
    """
    generator = torch.Generator().manual_seed(7)
    images = torch.from_numpy(_digits()[0])[:, None]
    count = len(images)

    def uniform(bound: float) -> torch.Tensor:
        return (torch.rand(count, generator=generator, dtype=torch.float32) * 2 - 1) * bound

    variants = []
    for _ in range(NUM_VARIANTS):
        angle, slant = uniform(0.21), uniform(0.15)
        width, height = 1 + uniform(0.12), 1 + uniform(0.12)
        cos, sin = torch.cos(angle), torch.sin(angle)
        rows = [
            torch.stack([cos * width, -sin * height + slant, uniform(0.2)], dim=1),
            torch.stack([sin * width, cos * height, uniform(0.2)], dim=1),
        ]
        grid = functional.affine_grid(torch.stack(rows, dim=1), [count, 1, IMAGE_SIDE, IMAGE_SIDE], align_corners=False)
        variants.append(functional.grid_sample(images, grid, align_corners=False))
    return torch.cat([*variants, images], dim=1).transpose(0, 1)


@functools.cache
def _patch_pixels() -> torch.Tensor:
    """Return the index of each pixel of each patch in the padded image."""
    padded_side = IMAGE_SIDE + 2
    places = torch.arange(padded_side**2).view(padded_side, padded_side)
    patches = places.unfold(0, 4, 2).unfold(1, 4, 2)
    return patches.reshape(PATCHES_PER_IMAGE, PIXELS_PER_PATCH)


def patches(images: Sequence[Image], dtype: torch.dtype) -> torch.Tensor:
    """Return the patches of images, ``(len(images), PATCHES_PER_IMAGE, PIXELS_PER_PATCH)``."""
    variants = torch.tensor([image.variant for image in images], dtype=torch.long)
    indices = torch.tensor([image.index for image in images], dtype=torch.long)
    padded = functional.pad(_pool()[variants, indices], (1, 1, 1, 1)).flatten(1)
    # Centered on zero, with a standard deviation of about one.
    return ((padded[:, _patch_pixels()] - 0.3) / 0.38).to(dtype)


def _document(identifier: str, rng: np.random.Generator, images: Sequence[Image], names: Sequence[int]) -> Document:
    """Write a document with images, or with names if there are no images."""
    prompt: list[int] = []
    lines: list[int] = []

    def write(tokens: Sequence[int], line: int) -> None:
        prompt.extend(tokens)
        lines.extend([line] * len(tokens))

    def fillers(low: int, high: int) -> list[int]:
        count = int(rng.integers(low, high))
        return [FIRST_FILLER + int(word) for word in rng.integers(len(FILLERS), size=count)]

    write([*fillers(1, 13), STOP], 0)
    things = [[IMAGE] * TOKENS_PER_IMAGE for _ in images] or [[FIRST_NAME + n] for n in names]
    for line, thing in enumerate(things, start=1):
        write([*fillers(0, 3), *thing, *fillers(0, 3), STOP], line)
    write([ANSWER], 1)
    labels = _digits()[1]
    digits = tuple(int(labels[image.index]) for image in images) if images else tuple(names)
    return Document(identifier, tuple(prompt), tuple(lines), tuple(images), digits)


def _draw(identifier: str, rng: np.random.Generator, rows: IntArray, intensity: float, plain: bool) -> Document:
    """Draw a document whose number of images has a mean of nearly ``intensity``."""
    # Geometric distribution from zero: most documents have few images.
    count = min(int(rng.geometric(1 / (1 + intensity))) - 1, MAX_LINES)
    if count == 0:
        names = [int(name) for name in rng.integers(10, size=int(rng.integers(1, 9)))]
        return _document(identifier, rng, (), names)
    images = [
        Image(int(row), -1 if plain else int(rng.integers(NUM_VARIANTS)))
        for row in rng.choice(rows, size=count, replace=False)
    ]
    return _document(identifier, rng, images, ())


def batch(seed: int, iteration: int, documents_per_batch: int) -> list[Document]:
    """Return the documents of one training iteration."""
    rng = np.random.default_rng((seed, iteration))
    intensity = float(INTENSITY_MEDIAN * np.exp(rng.normal(0.0, INTENSITY_SIGMA)))
    rows = split()[0]
    return [_draw(f"{iteration}-{number}", rng, rows, intensity, plain=False) for number in range(documents_per_batch)]


def batches(seed: int, num_iterations: int, documents_per_batch: int, start: int = 0) -> Iterator[list[Document]]:
    """Yield the batches of the iterations from ``start`` to ``num_iterations``."""
    for iteration in range(start, num_iterations):
        yield batch(seed, iteration, documents_per_batch)


def held_out_documents(num_documents: int = 400, intensity: float = 3.1, seed: int = 99) -> list[Document]:
    """Return documents with undistorted images that are not in the training set."""
    rng = np.random.default_rng((seed,))
    rows = split()[1]
    return [_draw(f"held-out-{number}", rng, rows, intensity, plain=True) for number in range(num_documents)]


def describe(document: Document) -> dict[str, object]:
    """Return the sizes of a document for the planner."""
    count = len(document.images)
    return {
        "id": document.identifier,
        "text_tokens": len(document.inputs) - count * TOKENS_PER_IMAGE,
        "image_tokens": [TOKENS_PER_IMAGE] * count,
        "image_patches": [PATCHES_PER_IMAGE] * count,
    }
