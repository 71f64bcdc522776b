"""Who hands what to whom: decided by layout and packing alone, the same for lowering, checking and running."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pipeloom.errors import InputError
from pipeloom.packing import Packing
from pipeloom.spec import Layout, ModelSpec, Workload

Shapes = Callable[[int, Workload], tuple[tuple[int, ...], str]]
"""From a chunk number and a workload to shape and dtype of the chunk's output."""


class Unit(NamedTuple):
    """One chunk's work on one (sub-)microbatch; its F and its backward belong to one unit."""

    chunk: int
    microbatch: int
    sub_microbatch: int


class HandOver(NamedTuple):
    """The output of one unit goes into another, and where ``gradient`` is set its gradient comes back."""

    producer: Unit
    consumer: Unit
    gradient: bool


@dataclass(frozen=True)
class Routes:
    """All hand-overs of one iteration.

    Attributes
    ----------
    units : tuple of Unit
    hand_overs : tuple of HandOver
        Those of one consumer stand in the order in which it concatenates them.
    """

    units: tuple[Unit, ...]
    hand_overs: tuple[HandOver, ...]

    @cached_property
    def into(self) -> Mapping[Unit, tuple[HandOver, ...]]:
        """Hand-overs by consumer; units without any are absent."""
        return _grouped((hand_over.consumer, hand_over) for hand_over in self.hand_overs)

    @cached_property
    def out_of(self) -> Mapping[Unit, tuple[HandOver, ...]]:
        """Hand-overs by producer; units without any are absent."""
        return _grouped((hand_over.producer, hand_over) for hand_over in self.hand_overs)

    def target_is_needed(self, producer: Unit) -> bool:
        """Whether messages of this producer must name their consumer, because there are several."""
        return len(self.out_of.get(producer, ())) > 1


def make_routes(layout: Layout, packing: Packing, units: Iterable[Unit]) -> Routes:
    """Connect the units of one iteration.

    Inside a module, chunk to next chunk for each sub-microbatch. At a module boundary all sub-microbatches go
    into the one part of the reading module, in order; where both are cut alike, part by part.

    Parameters
    ----------
    layout : Layout
    packing : Packing
    units : iterable of Unit
        Every unit that has an F. (For a replicated module they say on which rank each part is worked on.)

    Raises
    ------
    InputError
        When a unit is missing, unknown or doubled, or parts at a module boundary match in neither way.
    """
    listed = list(units)
    known = set(listed)
    if len(known) != len(listed):
        raise InputError(f"unit {_name(layout, _first_double(listed))}", "has two forwards")
    hand_overs: list[HandOver] = []
    expected: set[Unit] = set()
    for microbatch in range(len(packing.microbatches)):
        passes: dict[str, list[tuple[Unit, ...]]] = {}
        for module in layout.modules:
            gradient = layout.has_backward(module.name)
            parts = range(len(packing.parts_of(microbatch, module.name)))
            passes[module.name] = [_units_of(layout, module.name, microbatch, sub, known) for sub in parts]
            for units_of_part in passes[module.name]:
                expected.update(units_of_part)
                hand_overs += [HandOver(a, b, gradient) for a, b in itertools.pairwise(units_of_part)]
            for source in module.after:
                hand_overs += _join(
                    passes[source], passes[module.name], layout.has_backward(source),
                    f"module {module.name!r}.sub_microbatch", f"microbatch {microbatch}", source,
                )  # fmt: skip
    stray = known - expected
    if stray:
        raise InputError(
            f"unit {_name(layout, min(stray))}", "is not in the packing", "plan for this packing"
        )
    return Routes(tuple(listed), tuple(hand_overs))


def boundary_shapes(model: ModelSpec, layout: Layout) -> Shapes:
    """Shape and dtype of every chunk's output, as the model states it for the chunk's last layer."""
    outputs = [model.module(chunk.module).flat_layers[chunk.layers[1]].output for chunk in layout.chunks]

    def shapes(chunk: int, workload: Workload) -> tuple[tuple[int, ...], str]:
        return outputs[chunk].resolve(workload), outputs[chunk].dtype

    return shapes


def _units_of(layout: Layout, module: str, microbatch: int, sub: int, known: set[Unit]) -> tuple[Unit, ...]:
    """Units that one part of one module passes, in model order."""
    candidates = [Unit(chunk, microbatch, sub) for chunk in layout.chunks_of(module)]
    present = tuple(unit for unit in candidates if unit in known)
    wanted = 1 if layout.module(module).on_ranks == "replicated" else len(candidates)
    if len(present) != wanted:
        missing = next(unit for unit in candidates if unit not in known or wanted == 1)
        raise InputError(
            f"unit {_name(layout, missing)}",
            f"{len(present)} of the units of this part are planned, {wanted} expected",
            "plan every part exactly once",
        )
    return present


def _join(
    above: list[tuple[Unit, ...]],
    below: list[tuple[Unit, ...]],
    gradient: bool,
    entity: str,
    where: str,
    source: str,
) -> list[HandOver]:
    if not above:
        return []
    if len(below) == 1:
        return [HandOver(up[-1], below[0][0], gradient) for up in above]
    if len(above) == len(below):
        return [HandOver(up[-1], down[0], gradient) for up, down in zip(above, below, strict=True)]
    raise InputError(
        entity,
        f"cuts {where} into {len(below)} parts, {source!r} before it into {len(above)}",
        "let the reading module take whole microbatches, or cut both alike",
    )


def _grouped(entries: Iterable[tuple[Unit, HandOver]]) -> dict[Unit, tuple[HandOver, ...]]:
    groups: defaultdict[Unit, list[HandOver]] = defaultdict(list)
    for unit, hand_over in entries:
        groups[unit].append(hand_over)
    return {unit: tuple(group) for unit, group in groups.items()}


def _first_double(units: list[Unit]) -> Unit:
    seen: set[Unit] = set()
    for unit in units:
        if unit in seen:
            return unit
        seen.add(unit)
    raise AssertionError("no double")


def _name(layout: Layout, unit: Unit) -> str:
    if not 0 <= unit.chunk < len(layout.chunks):
        return f"{tuple(unit)}"
    return f"{layout.chunk_name(unit.chunk)} {unit.microbatch}.{unit.sub_microbatch}"
