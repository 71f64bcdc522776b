"""Memory options of layers in the emulator, from which mixtures are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeloom.cost.mixtures import LayerOption
from pipeloom.emulator.program import Part
from pipeloom.emulator.tape import PCIE
from pipeloom.emulator.template import EvaluatedLayer, LayerTemplate
from pipeloom.spec import TRAITS, Strategy, Workload


class ParetoSteps(NamedTuple):
    """Number of mixtures that a chunk is offered: without offloading, and of all."""

    free: int = 7
    offloading: int = 3


def computed_as(strategy: Strategy) -> Strategy:
    """Return the strategy with the same computation. Copies to the host are on a separate lane."""
    return "keep" if TRAITS[strategy].offloads else strategy


def layer_options(layer: LayerTemplate, workload: Workload) -> tuple[LayerOption, ...]:
    """Return the options of one layer in picoseconds: first ``keep``, then those that hold less."""
    here = layer.on(workload)
    found: list[LayerOption] = []
    for strategy in layer.passes:
        option = LayerOption(
            strategy,
            _duration_ps(here, computed_as(strategy), "F"),
            _duration_ps(here, computed_as(strategy), "B"),
            here.activation_bytes[strategy],
            here.host_bytes[strategy],
            _copy_ps(here, strategy, "F"),
            _copy_ps(here, strategy, "B"),
        )
        if not found or option.activation_bytes < found[0].activation_bytes:
            found.append(option)
    return tuple(found)


def _duration_ps(layer: EvaluatedLayer, strategy: Strategy, part: Part) -> int:
    leaf = layer.leaves.get((strategy, part))
    return 0 if leaf is None else max(0, int(leaf.matrix.max()))


def _copy_ps(layer: EvaluatedLayer, strategy: Strategy, part: Part) -> int:
    """Return the picoseconds for which a pass occupies the link to the host."""
    leaf = layer.leaves.get((strategy, part))
    if leaf is None or not TRAITS[strategy].offloads:
        return 0
    return int(leaf.duration_ps[leaf.device == PCIE].sum())


def staging_bytes(layers: Sequence[LayerTemplate], workload: Workload) -> int:
    """Return the bytes of buffers for copies to and from the host that overlap with other passes.

    Each direction needs two buffers of a layer's size, or the offloaded bytes of the chunk if these are fewer. This
    suffices because a forward takes at least as long as its copies out. So at the end of a pass, a lane has at most one
    layer left, while the other buffer is filled. Copies in are the same in reverse, and may start this much earlier.
    Tensors that have not left when they are needed stay.
    """
    sizes = [max(layer.on(workload).host_bytes.values()) for layer in layers]
    return 2 * min(sum(sizes), 2 * max(sizes))
