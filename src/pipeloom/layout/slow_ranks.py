"""Adapt a layout to slow ranks by giving them fewer layers, based on times measured in training.

Only the layers at which chunks begin change. Some partitions are computed from loads. From the one that is planned to
be fastest on real batches, one layer moves at a time while that helps.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from pipeloom.cost import slowness_of
from pipeloom.cost.encoder_dp import costs_under_layout
from pipeloom.errors import InfeasibleError
from pipeloom.layout.choose import LayoutDraft, LayoutEvaluation, evaluate_layout
from pipeloom.layout.layouts import partition_chain, typical_seconds
from pipeloom.layout.training import TRIAL, Preview
from pipeloom.packing import packed_batch
from pipeloom.search import Budget, OrderRule
from pipeloom.spec import Chunk, Layout

LayerSeconds = Mapping[str, Sequence[float]]
"""Seconds of every layer by module, on a rank of normal speed."""

_ROUNDS, _SHIFTS = 3, 6
"""Number of rounds in which a layer moves to a neighboring chunk, and number of best moves that are planned in each."""


class RelayoutResult(NamedTuple):
    """The current layout and the fastest layout found. They are equal if no other is faster."""

    before: LayoutEvaluation
    best: LayoutEvaluation

    @property
    def gain(self) -> float:
        """Fraction of the planned iteration time that the fastest layout saves."""
        return 1.0 - self.best.seconds / self.before.seconds


def relaid(
    previews: Sequence[Preview],
    layout: Layout,
    rule: OrderRule | None = None,
    others: Iterable[Layout] = (),
    *,
    trial: Budget = TRIAL,
    seed: int = 0,
) -> RelayoutResult:
    """Search for a layout that is faster than the current one on the measured ranks.

    Parameters
    ----------
    previews : sequence of Preview
        One preview for each replica with its share of some batches and the slowness of its ranks. The assignment of
        samples balances replicas, so layouts are compared by the throughput of all replicas together.
    rule : OrderRule or None
        Priority rule that was found with the layout.
    others : iterable of Layout
        Additional layouts to try, with the same number of chunks on the same ranks.
    trial : Budget
        Search budget for each layout and batch.

    Raises
    ------
    InfeasibleError
        The current layout does not fit.
    """
    sampled = [preview.sampled() for preview in previews]
    known: dict[tuple[Chunk, ...], LayoutEvaluation] = {}

    def tried(made: Layout, incumbent_s: float = float("inf")) -> LayoutEvaluation:
        if made.chunks not in known:
            draft = LayoutDraft("", made, None if rule is None else rule.moved_to(made))
            # The time of one replica is no bound for all replicas.
            most_s = incumbent_s if len(sampled) == 1 else float("inf")
            each = [evaluate_layout(one, draft, trial, seed, most_s) for one in sampled]
            failed = next((one for one in each if one.problem), None)
            known[made.chunks] = failed or dataclasses.replace(
                each[0], seconds=statistics.harmonic_mean([one.seconds for one in each])
            )
        return known[made.chunks]

    before = best = tried(layout)
    if before.problem:
        raise InfeasibleError(before.problem)
    seconds = layer_seconds(previews, layout)
    slowness = [statistics.fmean(slowness_of(one.costs, rank) for one in previews) for rank in range(layout.num_ranks)]
    by_module = rebalanced(layout, seconds, slowness)
    for made in (by_module, *others, evened(layout, seconds, slowness), evened(by_module, seconds, slowness)):
        best = min(best, tried(made, best.seconds), key=lambda found: found.planned_s)
    for _ in range(_ROUNDS):
        center = best
        moves = sorted(shifted(center.layout), key=lambda made: _slowest(rank_seconds(made, seconds, slowness)))
        for made in moves[:_SHIFTS]:
            best = min(best, tried(made, best.seconds), key=lambda found: found.planned_s)
        if best is center:
            break
    return RelayoutResult(before, best)


def layer_seconds(previews: Sequence[Preview], layout: Layout) -> dict[str, list[float]]:
    """Return the seconds of every layer in an iteration, packed as in training, on a rank of normal speed."""
    found: dict[str, list[float]] = {}
    for preview in previews:
        model, costs = preview.model, dataclasses.replace(preview.costs, slowness=())
        packed = [packed_batch(batch, model, layout, preview.costs, preview.packing) for batch in preview.batches]
        seconds = typical_seconds(model, costs_under_layout(costs, preview.over_tensor_ranks(layout)), packed)
        for module in model.modules:
            here = [seconds[f"{module.name}/{layer.kind}"] for layer in module.flat_layers]
            before = found.get(module.name, [0.0] * len(here))
            found[module.name] = [a + b for a, b in zip(before, here, strict=True)]
    return found


def _cut(layout: Layout, name: str, firsts: Sequence[int]) -> Layout:
    """Return the layout with the chunks of a module beginning at other layers."""
    numbers, chunks = layout.chunks_of(name), list(layout.chunks)
    last = chunks[numbers[-1]].layers[1]
    for number, first, behind in zip(numbers, firsts, (*firsts[1:], last + 1), strict=True):
        chunks[number] = msgspec.structs.replace(chunks[number], layers=(first, behind - 1))
    return msgspec.structs.replace(layout, chunks=tuple(chunks))


def _divided(layout: Layout) -> list[str]:
    """Return the modules that have several chunks."""
    pipelined = (module.name for module in layout.modules if module.on_ranks != "replicated")
    return [name for name in pipelined if len(layout.chunks_of(name)) > 1]


def rebalanced(layout: Layout, seconds: LayerSeconds, slowness: Sequence[float]) -> Layout:
    """Partition every module separately to balance the times of its chunks on their ranks."""
    for name in _divided(layout):
        times = [slowness[layout.chunks[number].rank] for number in layout.chunks_of(name)]
        layout = _cut(layout, name, [first for first, _ in partition_chain(seconds[name], len(times), times)])
    return layout


def shifted(layout: Layout) -> Iterator[Layout]:
    """Yield every layout in which one layer moves to a neighboring chunk."""
    for name in _divided(layout):
        chunks = [layout.chunks[number] for number in layout.chunks_of(name)]
        firsts = [chunk.layers[0] for chunk in chunks]
        for behind, (left, right) in enumerate(itertools.pairwise(chunks), 1):
            for step, giver in ((1, right), (-1, left)):
                if giver.num_layers > 1:
                    yield _cut(layout, name, [first + step * (i == behind) for i, first in enumerate(firsts)])


def evened(layout: Layout, seconds: LayerSeconds, slowness: Sequence[float]) -> Layout:
    """Move single layers of any module while the time of the slowest rank decreases."""

    def taken(made: Layout) -> tuple[float, float]:
        return _slowest(rank_seconds(made, seconds, slowness))

    best = taken(layout)
    while True:
        made = min(shifted(layout), key=taken, default=layout)
        if not taken(made) < best:
            return layout
        layout, best = made, taken(made)


def _slowest(times: Sequence[float]) -> tuple[float, float]:
    """Return the time of the slowest rank, and the sum of squared times to break ties."""
    return max(times), sum(time * time for time in times)


def rank_seconds(layout: Layout, seconds: LayerSeconds, slowness: Sequence[float]) -> list[float]:
    """Return the compute seconds of every rank. Replicated modules are shared so that all ranks end together."""
    whole = [module.name for module in layout.modules if module.on_ranks == "replicated"]
    times = [0.0] * layout.num_ranks
    for chunk in layout.chunks:
        if chunk.module not in whole:
            first, last = chunk.layers
            times[chunk.rank] += slowness[chunk.rank] * sum(seconds[chunk.module][first : last + 1])
    shared, speed = sum(sum(seconds[name]) for name in whole), 0.0
    # Ranks join in order of their other work, as long as the shared work ends after the next rank becomes free.
    for time, slow in sorted(zip(times, slowness, strict=True)):
        if speed and shared / speed <= time:
            break
        shared, speed = shared + time / slow, speed + 1 / slow
    return [max(time, shared / speed) for time in times] if whole else times


def layers_in_words(layout: Layout) -> str:
    """Describe how many layers of each partitioned module are on every rank: ``vision 1+1, lm 4+3``."""
    words = []
    for name in _divided(layout):
        counts = [0] * layout.num_ranks
        for number in layout.chunks_of(name):
            counts[layout.chunks[number].rank] += layout.chunks[number].num_layers
        words.append(f"{name} {'+'.join(map(str, counts))}")
    return ", ".join(words)
