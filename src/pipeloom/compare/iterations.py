"""Iterations for comparisons, drawn from a data set or packed from a user's samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster, draw_iteration
from pipeloom.errors import InputError
from pipeloom.integrations.data.sources import names_samples, read_all_samples
from pipeloom.iteration.microbatches import default_data, drawn_samples, left_out, repeated
from pipeloom.spec import Sample
from pipeloom.spec.architecture import Architecture
from pipeloom.spec.datasets import CONTEXT_TOKENS, cut, draw_samples, own_clips_of_iterations, pack_documents
from pipeloom.spec.media_tokens import as_model_makes, check_lengths, disagreements, missing_data


@dataclass(frozen=True)
class Grouping:
    """Rule that turns consecutive samples into microbatches."""

    num_microbatches: int = 16
    """Microbatches of one iteration of one replica."""
    tokens: int | None = None
    """Most tokens of a microbatch; None: `CONTEXT_TOKENS`, or the number of the papers for a data set of the zoo."""
    samples: int | None = None
    """Samples per microbatch; None: limit tokens instead."""
    pad_to: int | None = None
    """Number of tokens to which every sample is padded; None: no padding."""


@dataclass(frozen=True)
class Iterations:
    """One iteration for the comparison, and ``typical`` iterations for the choice of layouts.

    ``groups`` are the microbatches. ``notes`` say where the data differ from what the model makes of them.
    """

    typical: Sequence[Microbatches]
    groups: Microbatches
    notes: tuple[str, ...] = ()
    unpadded: Iterations | None = None
    """The same without padding; None: these have no padding."""

    @property
    def real(self) -> Iterations:
        """The iterations without padding."""
        return self.unpadded or self


def sampled_iterations(
    setting: ModelOnCluster, data: str | None, grouping: Grouping, seed: int, batches: Microbatches = ()
) -> Iterations:
    """Return the iteration for the comparison, and iterations for the choice of layouts.

    The first of a user's samples form the iteration, the rest the iterations for layouts. If there are too few for
    another iteration, layouts are chosen on the iteration itself.

    ``data`` is a data set of the zoo, or a file, pattern or folder of samples (``.jsonl``, ``.parquet``, ``.tar``).
    Without it, the iteration has the ``batches`` that came with the model, in turn, or the model's own data set. Raise
    `InputError` if there are too few samples, a sample is longer than a microbatch or the padding, or ``grouping`` sets
    a size for videos, or one that ``batches`` do not have.
    """
    count = grouping.num_microbatches
    if _reads_videos(setting.architecture) and (grouping.tokens or grouping.samples or grouping.pad_to):
        raise InputError(
            "microbatches",
            f"{setting.architecture.name} reads videos, which are grouped by size",
            "leave out sizes of microbatches",
        )
    notes: list[str] = []
    typical: Sequence[Microbatches]
    if data is None and batches:
        _check_sizes(batches, grouping)
        real = repeated(batches, count)
        notes += left_out(batches, count)
        typical = [real]
    elif data is None or not names_samples(data):
        if data is not None and data.endswith(".toml"):
            notes += disagreements(setting.architecture, draw_samples(data, 100, seed))
        typical = [_drawn(setting, data, grouping, seed + 1_000_003 + i) for i in range(2)]
        real = _drawn(setting, data, grouping, seed)
    else:
        samples, notes = as_model_makes(setting.architecture, read_all_samples(data))
        microbatches = own_microbatches(setting.architecture, samples, grouping)
        if len(microbatches) < count:
            if grouping.pad_to is not None:
                _padded(microbatches, grouping.pad_to)  # a sample that is too long explains more than their number
            raise InputError(
                data,
                f"gives {len(microbatches)} microbatches, {count} are needed",
                "ask for fewer microbatches, or give more samples",
            )
        real = microbatches[:count]
        rest = [microbatches[i : i + count] for i in range(count, len(microbatches) - count + 1, count)][:2]
        typical = rest or [real]
    check_lengths(setting.architecture, itertools.chain.from_iterable(itertools.chain(real, *typical)))
    notes += missing_data(setting.architecture, [sample for microbatch in real for sample in microbatch])
    found = Iterations(typical, real, tuple(notes))
    if grouping.pad_to is None:
        return found
    padded = [_padded(each, grouping.pad_to) for each in typical]
    return Iterations(padded, _padded(real, grouping.pad_to), found.notes, found)


def _num_samples(grouping: Grouping) -> int | None:
    """Return the samples of a microbatch. If they are padded, their padding counts in its tokens.

    Raise `InputError` if a padded sample is larger than a microbatch.
    """
    if grouping.pad_to is None or grouping.samples is not None:
        return grouping.samples
    count = (grouping.tokens or CONTEXT_TOKENS) // grouping.pad_to
    if grouping.tokens is not None and not count:
        problem = f"{grouping.pad_to} is above the {grouping.tokens} tokens of a microbatch"
        raise InputError("pad_to", problem, "allow more tokens, or pad to fewer")
    return max(1, count)


def own_microbatches(architecture: Architecture, samples: Sequence[Sample], grouping: Grouping) -> list[list[Sample]]:
    """Pack a user's samples into microbatches, in order. Whole clips are grouped by length within each iteration."""
    if _reads_videos(architecture):
        clips = own_clips_of_iterations(list(samples), grouping.num_microbatches)
        return [microbatch for iteration in clips for microbatch in iteration]
    if (size := _num_samples(grouping)) is not None:
        return _by_number(samples, size)
    tokens = grouping.tokens or CONTEXT_TOKENS
    longest = max(samples, key=lambda s: s.sequence_tokens)
    if longest.sequence_tokens > tokens:
        raise InputError(
            f"sample {longest.id!r}",
            f"has {longest.sequence_tokens} tokens, a microbatch {tokens}",
            "allow more tokens, or shorten the sample",
        )
    return pack_documents(list(samples), tokens, max_images=tokens)


def _drawn(setting: ModelOnCluster, data: str | None, grouping: Grouping, seed: int) -> Microbatches:
    """Draw an iteration from a data set of the zoo, packed as in its papers by default."""
    count, architecture, size = grouping.num_microbatches, setting.architecture, _num_samples(grouping)
    if _reads_videos(architecture) or (size is None and grouping.tokens is None):
        return draw_iteration(setting, count, seed, data)
    pack: Callable[[list[Sample]], list[list[Sample]]]
    tokens = grouping.tokens or CONTEXT_TOKENS
    if size is None:
        # The last microbatch is not full.
        factor, pack = max(24, tokens // 256), lambda s: pack_documents(s, tokens, max_images=tokens)[:-1]
    elif grouping.samples is None:
        factor, pack = size, lambda s: _by_number([cut(each, tokens, tokens) for each in s], size)
    else:
        factor, pack = size, lambda s: _by_number(s, size)
    name = data or default_data(architecture)
    while True:
        samples = drawn_samples(architecture, name, count * factor, seed)
        if len(microbatches := pack(samples)) >= count:
            return microbatches[:count]
        factor *= 2


def _check_sizes(batches: Microbatches, grouping: Grouping) -> None:
    """Raise `InputError` if the largest of the batches that came with a model does not have the set size."""
    largest = {"samples": max(map(len, batches)), "tokens": max(sum(s.sequence_tokens for s in b) for b in batches)}
    for unit, has in largest.items():
        if (size := getattr(grouping, unit)) not in (None, has):
            raise InputError(
                "microbatches",
                f"of {size} {unit} are set, but they are the batches that came with the model, of up to {has}",
                "leave out their size, or give --data",
            )


def _by_number(samples: Sequence[Sample], size: int) -> list[list[Sample]]:
    """Return complete microbatches of ``size`` samples; drop the rest."""
    return [list(samples[i : i + size]) for i in range(0, len(samples) - size + 1, size)]


def _reads_videos(architecture: Architecture) -> bool:
    return any(module.reads == "videos" for module in architecture.modules)


def _padded(microbatches: Microbatches, pad_to: int) -> list[list[Sample]]:
    """Pad every sample with text to ``pad_to`` tokens."""
    return [[_padded_sample(sample, pad_to) for sample in microbatch] for microbatch in microbatches]


def _padded_sample(sample: Sample, pad_to: int) -> Sample:
    missing = pad_to - sample.sequence_tokens
    if missing < 0:
        raise InputError(
            f"sample {sample.id!r}",
            f"has {sample.sequence_tokens} tokens, samples are padded to {pad_to}",
            "pad to more tokens, or shorten the sample",
        )
    return msgspec.structs.replace(sample, text_tokens=sample.text_tokens + missing)
