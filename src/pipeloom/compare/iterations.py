"""Iterations to compare systems on: drawn from a data set, or packed from a user's own samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster, draw_iteration
from pipeloom.emulator.sweep import default_data, drawn_samples
from pipeloom.errors import InputError
from pipeloom.integrations.data.sources import names_samples, read_all_samples
from pipeloom.spec import Sample
from pipeloom.spec.architecture import Architecture
from pipeloom.spec.datasets import clips_of_iterations, pack_documents

TOKENS = 8192
"""Of a microbatch at most, where nobody says."""


@dataclass(frozen=True)
class Grouping:
    """How samples in order become microbatches."""

    num_microbatches: int = 16
    """Of one iteration of one replica."""
    tokens: int | None = None
    """Of a microbatch at most; None: `TOKENS`, or of a data set of the zoo, what its papers have."""
    samples: int | None = None
    """Of a microbatch, whatever their tokens; None: by tokens."""
    pad_to: int | None = None
    """Tokens that every sample is padded to; None: not."""


@dataclass(frozen=True)
class Iterations:
    """One iteration to compare systems on, and others to choose layouts on before it.

    ``groups`` are padded where they are; ``real`` are the same without: what is learnt from.
    """

    typical: Sequence[Microbatches]
    groups: Microbatches
    real: Microbatches


def sampled_iterations(case: ModelOnCluster, data: str | None, grouping: Grouping, seed: int) -> Iterations:
    """Take the iteration to compare systems on, and those to choose layouts on.

    Of a user's own samples the first make the iteration, the rest those before it; where there are not enough for
    another, layouts are chosen on the iteration itself.

    Parameters
    ----------
    data : str or None
        A data set of the zoo, or samples (``.jsonl``, ``.parquet``, ``.tar``): a file, a pattern, a folder; None: the
        model's own set.

    Raises
    ------
    InputError
        Too few samples, one that is longer than a microbatch or what samples are padded to, or a size of microbatches
        of videos.
    """
    count = grouping.num_microbatches
    if _reads_videos(case.architecture) and (grouping.tokens or grouping.samples or grouping.pad_to):
        raise InputError(
            "microbatches", f"{case.architecture.name} reads videos, which go together by size", "say nothing of a size"
        )
    if data is None or not names_samples(data):
        typical: Sequence[Microbatches] = [_drawn(case, data, grouping, seed + 1_000_003 + i) for i in range(2)]
        real = _drawn(case, data, grouping, seed)
    else:
        groups = own_groups(case.architecture, read_all_samples(data), grouping)
        if len(groups) < count:
            raise InputError(
                data,
                f"gives {len(groups)} microbatches, {count} are wanted",
                "ask for fewer microbatches, or give more samples",
            )
        real = groups[:count]
        rest = [groups[i : i + count] for i in range(count, len(groups) - count + 1, count)][:2]
        typical = rest or [real]
    if grouping.pad_to is None:
        return Iterations(typical, real, real)
    return Iterations([_padded(each, grouping.pad_to) for each in typical], _padded(real, grouping.pad_to), real)


def own_groups(architecture: Architecture, samples: Sequence[Sample], grouping: Grouping) -> list[list[Sample]]:
    """Make microbatches of a user's own samples, in order; clips by their length, as the papers do.

    Clips are grouped iteration by iteration.
    """
    if _reads_videos(architecture):
        clips = clips_of_iterations(list(samples), grouping.num_microbatches)
        return [group for groups in clips for group in groups]
    if grouping.samples is not None:
        return _by_number(samples, grouping.samples)
    tokens = grouping.tokens or TOKENS
    longest = max(samples, key=lambda s: s.sequence_tokens)
    if longest.sequence_tokens > tokens:
        raise InputError(
            f"sample {longest.id!r}",
            f"has {longest.sequence_tokens} tokens, a microbatch {tokens}",
            "allow more tokens, or shorten the sample",
        )
    return pack_documents(list(samples), tokens, max_images=tokens)


def _drawn(case: ModelOnCluster, data: str | None, grouping: Grouping, seed: int) -> Microbatches:
    """An iteration of a data set of the zoo, as its papers pack it where nothing else is said."""
    count, architecture = grouping.num_microbatches, case.architecture
    if _reads_videos(architecture) or (grouping.samples is None and grouping.tokens is None):
        return draw_iteration(case, count, seed, data)
    group: Callable[[list[Sample]], list[list[Sample]]]
    if grouping.samples is None:
        tokens = grouping.tokens or TOKENS
        # The last one is not full.
        factor, group = max(24, tokens // 256), lambda s: pack_documents(s, tokens, max_images=tokens)[:-1]
    else:
        size = grouping.samples
        factor, group = size, lambda s: _by_number(s, size)
    name = data or default_data(architecture)
    while True:
        samples = drawn_samples(architecture, name, count * factor, seed)
        if len(groups := group(samples)) >= count:
            return groups[:count]
        factor *= 2


def _by_number(samples: Sequence[Sample], size: int) -> list[list[Sample]]:
    """Whole groups alone."""
    return [list(samples[i : i + size]) for i in range(0, len(samples) - size + 1, size)]


def _reads_videos(architecture: Architecture) -> bool:
    return any(module.reads == "videos" for module in architecture.modules)


def _padded(groups: Microbatches, pad_to: int) -> list[list[Sample]]:
    """The same samples with text up to so many tokens each."""
    return [[_padded_sample(sample, pad_to) for sample in group] for group in groups]


def _padded_sample(sample: Sample, pad_to: int) -> Sample:
    missing = pad_to - sample.sequence_tokens
    if missing < 0:
        raise InputError(
            f"sample {sample.id!r}",
            f"has {sample.sequence_tokens} tokens, samples are padded to {pad_to}",
            "pad to more, or shorten the sample",
        )
    return msgspec.structs.replace(sample, text_tokens=sample.text_tokens + missing)
