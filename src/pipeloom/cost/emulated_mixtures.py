"""What the layers of a chunk may do for memory, by the emulator: the options that mixtures are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeloom.cost.mixtures import LayerOption
from pipeloom.emulator.program import Part
from pipeloom.emulator.tape import PCIE
from pipeloom.emulator.template import EvaluatedLayer, LayerTemplate
from pipeloom.spec import TRAITS, Strategy, Workload


class Ladder(NamedTuple):
    """How many mixtures of strategies a chunk is offered: of those that keep off the host, and of all."""

    free: int = 7
    offloading: int = 3


def computed_as(strategy: Strategy) -> Strategy:
    """The strategy under which a layer computes as under this one: copies are on a lane of their own."""
    return "keep" if TRAITS[strategy].offloads else strategy


def layer_options(layer: LayerTemplate, workload: Workload) -> tuple[LayerOption, ...]:
    """Options of one layer in picoseconds: keeping everything first, the others where they hold less."""
    here = layer.on(workload)
    found: list[LayerOption] = []
    for strategy in layer.passes:
        option = LayerOption(
            strategy,
            _seconds(here, computed_as(strategy), "F"),
            _seconds(here, computed_as(strategy), "B"),
            here.activation_bytes[strategy],
            here.host_bytes[strategy],
            _copying(here, strategy, "F"),
            _copying(here, strategy, "B"),
        )
        if not found or option.activation_bytes < found[0].activation_bytes:
            found.append(option)
    return tuple(found)


def _seconds(layer: EvaluatedLayer, strategy: Strategy, part: Part) -> int:
    leaf = layer.leaves.get((strategy, part))
    return 0 if leaf is None else max(0, int(leaf.matrix.max()))


def _copying(layer: EvaluatedLayer, strategy: Strategy, part: Part) -> int:
    """Picoseconds that a pass keeps the link to the host busy."""
    leaf = layer.leaves.get((strategy, part))
    if leaf is None or not TRAITS[strategy].offloads:
        return 0
    return int(leaf.duration_ps[leaf.device == PCIE].sum())


def staging_bytes(layers: Sequence[LayerTemplate], workload: Workload) -> int:
    """Bytes that are on their way to the host or back while other passes run, in both directions.

    Two buffers of a layer's size for each, or what the chunk offloads in all where that is less. That suffices: a
    forward takes no less than its copies out, so a lane never has more to do at the end of a pass than what came at
    once, which is one layer (the other buffer is being filled); and the same backwards in time for copies in, which
    may begin that much ahead. What has not left when it is wanted back, stays.
    """
    sizes = [max(layer.on(workload).host_bytes.values()) for layer in layers]
    return 2 * min(sum(sizes), 2 * max(sizes))
