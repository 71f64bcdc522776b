"""Measured times of a step's stages and sizes of their outputs, gathered on one rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from pipeloom.integrations.steps.costs import BYTES, Measurements, Row
from pipeloom.integrations.steps.orders import KnownOrder
from pipeloom.integrations.steps.planning import Order, text_size
from pipeloom.integrations.steps.running import num_encoder_stages
from pipeloom.integrations.steps.shapes import Flat, flat_meta
from pipeloom.runtime.execute.result import StepResult
from pipeloom.spec import Layout, Strategy, word_strategies

StepTimes = tuple[list[Row], dict[int, float]]
"""Times of one rank, and sizes of its stages' outputs."""


def step_times(
    layout: Layout,
    stages: Iterable[int],
    known: KnownOrder,
    result: StepResult,
    microbatches: Sequence[Any],
    held: Mapping[tuple[int, int], int] | None = None,
) -> StepTimes:
    """Return the times of this rank's stages in a step, and the sizes of their outputs.

    ``microbatches`` are in the order of the data. ``held`` has the bytes held from forward to backward, by stage and
    number of the microbatch; None: not measured.
    """
    number_of = {name: i for i, name in enumerate(layout.chunk_names)}
    num_encoder, packed, order = num_encoder_stages(layout), known.packing.microbatches, known.order
    rows: list[Row] = []
    for time in result.compute_times:
        stage, here = number_of[time.chunk], packed[time.microbatch]
        part = here.parts[-1 if stage >= num_encoder else 0][time.sub_microbatch]
        strategy, seconds = _measured(order, here.samples[0], stage), (time.end_ns - time.start_ns) * 1e-9
        rows.append(Row(stage, str(time.verb), strategy, part.workload.lengths, seconds))
    for (stage, number), num_bytes in (held or {}).items():
        lengths = (text_size(order.sizes[number]),)
        rows.append(Row(stage, BYTES, _measured(order, number, stage), lengths, num_bytes))
    widths = {}
    for number in stages:
        sent = []
        for each in packed:
            microbatch, column = microbatches[each.samples[0]], 0 if number < num_encoder else -1
            holders = microbatch.parts if number < num_encoder else [microbatch]
            for holder, part in zip(holders, each.parts[column], strict=True):
                metas = holder.metas[number + 1]
                if metas is not None:
                    sent.append((flat_meta(metas), part.workload.num_tokens))
        if sent:
            widths[number] = sum(_words(meta) / size for meta, size in sent) / len(sent)
    return rows, widths


def _measured(order: Order, number: int, stage: int) -> Strategy:
    """Return the strategy of a stage for a microbatch. In steps that are measured, all of its layers have the same."""
    (strategy,) = word_strategies(order.strategy(number, stage))
    return strategy


def gather_times(times: StepTimes, into: Measurements | None, group: dist.ProcessGroup | None, place: int) -> None:
    """Gather the times of all ranks of a group on one of them, into its measurements. All ranks call it together."""
    every: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank(group) == place else None
    dist.gather_object(times, every, group=group, group_dst=place)
    if into is not None and every is not None:
        for rows, widths in every:
            into.note(rows, widths)


def _words(meta: Flat) -> float:
    """Return the size of a tensor in units of four bytes."""
    return math.prod(meta.shape) * meta.dtype.itemsize / 4
