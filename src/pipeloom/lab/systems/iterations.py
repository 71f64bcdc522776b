"""Iterations to compare systems on: drawn from a data set, or packed from a user's own samples."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.errors import InputError
from pipeloom.io import SAMPLE_SUFFIXES, read_samples
from pipeloom.lab.systems.model_on_cluster import Microbatches, ModelOnCluster, draw_iteration
from pipeloom.spec import Sample
from pipeloom.spec.architecture import Architecture
from pipeloom.spec.datasets import clips_of_iterations, pack_documents


def sampled_iterations(
    case: ModelOnCluster, data: str | None, num_microbatches: int, tokens: int, seed: int
) -> tuple[Sequence[Microbatches], Microbatches]:
    """Iterations to choose layouts on, and the one to compare.

    Of a user's own samples the first make the iteration, the rest those before it; where there are not enough for
    another, layouts are chosen on the iteration itself.

    Parameters
    ----------
    case : ModelOnCluster
    data : str or None
        A data set of the zoo, or a file of samples (``.jsonl``, ``.parquet``, ``.tar``); None: the model's own set.
    num_microbatches : int
        Of one iteration of one replica.
    tokens : int
        Of a microbatch at most, where samples are a user's own.
    seed : int

    Raises
    ------
    InputError
        Too few samples, or one that is longer than a microbatch.
    """
    if data is None or not data.endswith(SAMPLE_SUFFIXES):
        typical = [draw_iteration(case, num_microbatches, seed + 1_000_003 + i) for i in range(2)]
        return typical, draw_iteration(case, num_microbatches, seed, data)
    groups = own_groups(case.architecture, read_samples(data), tokens, num_microbatches)
    if len(groups) < num_microbatches:
        raise InputError(
            data,
            f"gives {len(groups)} microbatches, {num_microbatches} are wanted",
            "ask for fewer microbatches, or give more samples",
        )
    rest = [
        groups[i : i + num_microbatches]
        for i in range(num_microbatches, len(groups) - num_microbatches + 1, num_microbatches)
    ][:2]
    return rest or [groups[:num_microbatches]], groups[:num_microbatches]


def own_groups(architecture: Architecture, samples: Sequence[Sample], tokens: int, count: int) -> list[list[Sample]]:
    """Pack a user's own samples as the papers do: in order, up to a number of tokens, or clips by their length.

    Clips are grouped iteration by iteration, of ``count`` microbatches each.
    """
    if any(module.reads == "videos" for module in architecture.modules):
        return [group for groups in clips_of_iterations(list(samples), count) for group in groups]
    longest = max(samples, key=lambda s: s.sequence_tokens)
    if longest.sequence_tokens > tokens:
        raise InputError(
            f"sample {longest.id!r}",
            f"has {longest.sequence_tokens} tokens, a microbatch {tokens}",
            "allow more tokens, or shorten the sample",
        )
    return pack_documents(list(samples), tokens, max_images=tokens)
