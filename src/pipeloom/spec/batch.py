"""Metadata of samples: all that a planner may know before a batch is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pipeloom.bounds import Count, Duration, Number
from pipeloom.conversion import convert
from pipeloom.errors import InputError, check_count
from pipeloom.limits import MAX_COUNT

SIZES = (
    "image_tokens",
    "image_patches",
    "video_seconds",
    "video_height",
    "video_width",
    "audio_seconds",
    "audio_tokens",
)
"""Fields of a sample with one size for each image, clip or recording."""


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of one training sample. Names and defaults of fields are those of the sample metadata format."""

    id: str
    text_tokens: Number = 0
    image_tokens: tuple[Count, ...] = ()
    """Tokens in the language model, one entry per image."""
    image_patches: tuple[Count, ...] | None = None
    """Patches in the vision encoder, one entry per image. None: the same as ``image_tokens``."""
    video_seconds: tuple[Duration, ...] = ()
    video_height: tuple[Count, ...] = ()
    video_width: tuple[Count, ...] = ()
    audio_seconds: tuple[Duration, ...] = ()
    audio_tokens: tuple[Count, ...] | None = None
    """Tokens in the language model, one entry per recording. None: one per two positions of the encoder."""
    lengths: dict[str, tuple[Count, ...]] | msgspec.UnsetType = msgspec.UNSET
    """Sequence lengths in a module by its name, if the other fields do not determine them. One entry for each document,
    image, video or recording of the sample that the module reads."""

    def __post_init__(self) -> None:
        if not 0 <= self.text_tokens <= MAX_COUNT:
            problem = "is negative" if self.text_tokens < 0 else f"is above {MAX_COUNT}"
            raise InputError(f"sample {self.id!r}.text_tokens", f"{self.text_tokens} {problem}")
        for name in SIZES:
            for i, value in enumerate(getattr(self, name) or ()):
                if not 0 < value <= MAX_COUNT:
                    problem = f"is above {MAX_COUNT}" if value > MAX_COUNT else "is not positive and finite"
                    raise InputError(f"sample {self.id!r}.{name}[{i}]", f"{value} {problem}")
        for name, lengths in ({} if self.lengths is msgspec.UNSET else self.lengths).items():
            for i, length in enumerate(lengths):
                check_count(f"sample {self.id!r}.lengths[{name!r}][{i}]", length)
        for name, of, what in (
            ("image_patches", "image_tokens", "image"),
            ("audio_tokens", "audio_seconds", "recording"),
        ):
            given, counted = getattr(self, name), len(getattr(self, of))
            if given is not None and len(given) != counted:
                problem = f"{len(given)} entries, {of} has {counted}"
                raise InputError(f"sample {self.id!r}.{name}", problem, f"give one entry per {what} in both")

    @property
    def patches(self) -> tuple[int, ...]:
        """Patches per image; the language model's tokens if unknown."""
        return self.image_tokens if self.image_patches is None else self.image_patches

    @property
    def sequence_tokens(self) -> int:
        """Length of the sample in the backbone: its text tokens and the tokens of its images and recordings."""
        return self.text_tokens + sum(self.image_tokens) + sum(audio_tokens(self))


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The samples of one iteration of one pipeline replica, in the order of the loader."""

    samples: tuple[Sample, ...]
    iteration: Number = 0

    def __post_init__(self) -> None:
        """Raise `InputError` for an empty batch or a repeated id, which would lose or repeat a sample."""
        if not self.samples:
            raise InputError("batch.samples", "is empty", "give at least one sample")
        seen: set[str] = set()
        for i, sample in enumerate(self.samples):
            if sample.id in seen:
                raise InputError(f"batch.samples[{i}].id", f"{sample.id!r} occurs twice", "ids must be unique")
            seen.add(sample.id)

    def part(self, members: Sequence[int]) -> Batch:
        """Return the samples at some positions as a batch."""
        return Batch(tuple(self.samples[i] for i in members), self.iteration)


class Workload(msgspec.Struct, frozen=True):
    """Sequence lengths that one (sub-)microbatch sends through a module. Each sequence attends to itself.

    An image of ``n`` patches is a sequence of length ``n`` for its encoder. A packed document is a sequence for the
    language model. Costs are functions of the number of instances (PipeTune A.4: encoders by batch size), of tokens
    (dense layers) and of squared lengths (attention). Costs of a module that reads other modules also depend on its
    inputs from them: two documents of one length may have one image between them, or ten.
    """

    lengths: tuple[int, ...]
    given: tuple[tuple[int, int], ...] = ()
    """Number of sequences and tokens that each module that it reads gives to it. Empty: unknown."""

    @property
    def num_instances(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Sum of the lengths."""
        return sum(self.lengths)

    @property
    def num_token_pairs(self) -> int:
        """Sum of the squared lengths: query-key pairs of full attention."""
        return sum(n * n for n in self.lengths)

    def largest_share(self, num_ranks: int) -> Workload:
        """Return the largest share of a tensor-parallel rank, if instances are divided among ``num_ranks`` ranks."""
        shares = (
            Workload(self.lengths[first : first + count]) for first, count in split_instances(self.lengths, num_ranks)
        )
        most = max(shares, key=lambda share: (share.num_tokens, share.num_token_pairs))
        total = max(self.num_tokens, 1)
        # Its part of the inputs from other modules is its part of the tokens.
        given = tuple(tuple(-(-each * most.num_tokens // total) for each in pair) for pair in self.given)
        return msgspec.structs.replace(most, given=given)


def split_instances(lengths: Sequence[int], num_ranks: int) -> tuple[tuple[int, int], ...]:
    """Divide instances among tensor-parallel ranks in order, with the fewest tokens on the fullest rank.

    Return the first instance and the number of instances of every rank. The last ranks may have none. Costs, memory and
    the runtime all use this function, so the plan matches the run.
    """
    low, high = max(max(lengths, default=0), -(-sum(lengths) // num_ranks)), sum(lengths)
    while low < high:
        middle = (low + high) // 2
        if len(_runs(lengths, middle)) <= num_ranks:
            high = middle
        else:
            low = middle + 1
    runs = _runs(lengths, low)
    return (*runs, *((len(lengths), 0) for _ in range(num_ranks - len(runs))))


def _runs(lengths: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Divide instances greedily into consecutive runs of at most ``most`` tokens. Return first and count of each."""
    runs, first, tokens = [], 0, 0
    for i, length in enumerate(lengths):
        if tokens + length > most:
            runs.append((first, i - first))
            first, tokens = i, 0
        tokens += length
    return [*runs, (first, len(lengths) - first)]


AUDIO_FRAMES_PER_SECOND = 50
AUDIO_FRAMES_PER_TOKEN = 2


def audio_frames(sample: Sample) -> tuple[int, ...]:
    """Return the positions of an audio encoder for each recording: 50 per second, at least one.

    As in Whisper's encoder: a spectrum every 10 ms, whose number its convolutions halve.
    """
    return tuple(max(1, int(seconds * AUDIO_FRAMES_PER_SECOND + 0.5)) for seconds in sample.audio_seconds)


def audio_tokens(sample: Sample) -> tuple[int, ...]:
    """Return the tokens of each recording in the language model.

    If the sample does not state them, one per two encoder positions, 25 per second.
    """
    if sample.audio_tokens is not None:
        return sample.audio_tokens
    return tuple(-(-frames // AUDIO_FRAMES_PER_TOKEN) for frames in audio_frames(sample))


FRAMES_PER_SECOND = 16
FRAME_COMPRESSION = 8
PIXEL_COMPRESSION = 16


def video_tokens(sample: Sample) -> tuple[int, ...]:
    """Return the tokens of each video: 16 frames per second, one token for 8 frames and 16 x 16 pixels.

    MovieGen's auto-encoder compresses by 8 in time and in both directions of space, and its transformer joins 2 x 2
    latent pixels (DIP §7.1 uses MovieGen's configuration). A partial token counts as one, and a video has at least one
    token per 16 x 16 pixels. Raise `InputError` if a video's length, height or width is missing.
    """
    counts = len(sample.video_seconds), len(sample.video_height), len(sample.video_width)
    if len(set(counts)) > 1:
        raise InputError(
            f"sample {sample.id!r}",
            "has {} video_seconds, {} video_height and {} video_width".format(*counts),
            "give one entry per video in each",
        )
    out = []
    for seconds, height, width in zip(sample.video_seconds, sample.video_height, sample.video_width, strict=True):
        frames = -(-int(seconds * FRAMES_PER_SECOND + 0.5) // FRAME_COMPRESSION)
        out.append(max(1, frames) * -(-height // PIXEL_COMPRESSION) * -(-width // PIXEL_COMPRESSION))
    return tuple(out)


def batch_from_dicts(rows: list[dict[str, Any]], iteration: int = 0) -> Batch:
    """Build a batch from dictionaries, such as the results of a loader's ``describe`` function.

    Raises
    ------
    InputError
        If a row has an unknown field, a wrong type or an impossible size. The error names the row.
    """
    samples = [convert(row, Sample, f"batch.samples[{i}]") for i, row in enumerate(rows)]
    return Batch(samples=tuple(samples), iteration=iteration)
