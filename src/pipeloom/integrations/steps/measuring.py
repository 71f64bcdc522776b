"""Measured times of a step's stages and sizes of their outputs, gathered on one rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from pipeloom.integrations.steps.costs import BYTES, Measurements, Row
from pipeloom.integrations.steps.planning import Order
from pipeloom.integrations.steps.running import StepMicrobatch
from pipeloom.integrations.steps.shapes import Flat, flat_meta
from pipeloom.runtime.execute.result import StepResult
from pipeloom.spec import Layout

StepTimes = tuple[list[Row], dict[int, float]]
"""Times of one rank, and sizes of its stages' outputs."""


def step_times(
    layout: Layout,
    stages: Iterable[int],
    order: Order,
    result: StepResult,
    microbatches: Sequence[StepMicrobatch],
    held: Mapping[tuple[int, int], int] | None = None,
) -> StepTimes:
    """Return the times of this rank's stages in a step, and the sizes of their outputs.

    Parameters
    ----------
    stages : iterable of int
        Numbers of this rank's stages.
    microbatches : sequence of StepMicrobatch
        Microbatches of the step, in the order of ``order.sizes``.
    held : mapping or None
        Bytes held from forward to backward, by stage and number of the microbatch. None: not measured.
    """
    sizes, samples = order.sizes, order.samples
    number_of = {name: i for i, name in enumerate(layout.chunk_names)}
    rows = []
    for time in result.compute_times:
        stage, number = number_of[time.chunk], samples[time.microbatch]
        seconds = (time.end_ns - time.start_ns) * 1e-9
        rows.append(Row(stage, str(time.verb), order.strategy(number, stage), sizes[number], seconds))
    for (stage, number), num_bytes in (held or {}).items():
        rows.append(Row(stage, BYTES, order.strategy(number, stage), sizes[number], num_bytes))
    widths = {}
    for number in stages:
        every = [(each.metas[number + 1], size) for each, size in zip(microbatches, sizes, strict=True)]
        sent = [(flat_meta(metas), size) for metas, size in every if metas is not None]
        if sent:
            widths[number] = sum(_words(meta) / size for meta, size in sent) / len(sent)
    return rows, widths


def gather_times(times: StepTimes, into: Measurements | None, group: dist.ProcessGroup | None, place: int) -> None:
    """Gather the times of all ranks of a group on one of them. All ranks call it together.

    Parameters
    ----------
    into : Measurements or None
        Takes the times, on the rank that gathers.
    place : int
        Rank in the group that gathers.
    """
    every: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank(group) == place else None
    dist.gather_object(times, every, group=group, group_dst=place)
    if into is not None and every is not None:
        for rows, widths in every:
            into.note(rows, widths)


def _words(meta: Flat) -> float:
    """Return the size of a tensor in units of four bytes."""
    return math.prod(meta.shape) * meta.dtype.itemsize / 4
