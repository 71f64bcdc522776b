"""Modality-aware layouts by DIP's rules: sub-microbatch sizes, segments and chunks (DIP section 4)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain as joined
from itertools import pairwise

import msgspec

from pipeloom.cost import CostModel
from pipeloom.errors import InputError
from pipeloom.layout.layouts import LayerLoad, ModulePlacement, separate
from pipeloom.spec import Chunk, Layout, ModelSpec, Sample, Workload

ENOUGH = 0.95
"""Share of the best efficiency that a sub-microbatch must reach (DIP section 4)."""


@dataclass(frozen=True, slots=True)
class SizeChoice:
    """Efficiency by sub-microbatch size of one module, and the chosen size.

    Attributes
    ----------
    sizes : tuple of int
        Numbers of instances, increasing.
    efficiency : tuple of float
        Throughput at each size, relative to the best.
    seconds : float
        Time of the whole module, forward and backward, at the chosen size.
    """

    sizes: tuple[int, ...]
    efficiency: tuple[float, ...]
    chosen: int
    seconds: float


def sub_microbatch_size(
    costs: CostModel, module: str, num_layers: int, lengths: Sequence[int], share: float = ENOUGH
) -> SizeChoice:
    """Find the smallest sub-microbatch that keeps ``share`` of the best efficiency seen (DIP section 4).

    Parameters
    ----------
    lengths : sequence of int
        Typical instance lengths, one for each size to try. The first n represent a sub-microbatch of n instances.

    Raises
    ------
    InputError
        No lengths, or a share outside 0 to 1.
    """
    if not lengths:
        raise InputError(f"module {module!r}", "has no instances in the sampled batches")
    sizes = tuple(range(1, len(lengths) + 1))
    seconds = [_seconds(costs, module, num_layers, Workload(tuple(lengths[:n]))) for n in sizes]
    if not 0 < share <= 1:
        raise InputError("share", f"{share} is not above 0 and at most 1")
    # Tokens per second, so that unequal instances compare fairly.
    rates = [sum(lengths[:n]) / s if s > 0 else 0.0 for n, s in zip(sizes, seconds, strict=True)]
    best = max(rates) or 1.0
    efficiency = tuple(rate / best for rate in rates)
    chosen = next(i for i, each in enumerate(efficiency) if each >= share)
    return SizeChoice(sizes, efficiency, sizes[chosen], seconds[chosen])


def _seconds(costs: CostModel, module: str, num_layers: int, workload: Workload) -> float:
    base = costs.chunk_costs(Chunk(module, (0, num_layers - 1), 0), workload)[0]
    return base.forward_s + base.backward_s


def segment_counts(seconds: Mapping[str, float], num_layers: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """Segments of every module, ``floor(T_i / T_1)``, at most as many as its layers allow, and at least one.

    Parameters
    ----------
    seconds : mapping
        Time of a whole pass of each module at its own sub-microbatch size.

    Raises
    ------
    InputError
        The last module has fewer layers than there are ranks.
    """
    name, layers = list(num_layers.items())[-1]
    if layers < num_ranks:
        raise InputError(f"module {name!r}", f"has {layers} layers for {num_ranks} ranks", "use fewer ranks")
    least = min((s for s in seconds.values() if s > 0), default=1.0)
    return {name: max(1, min(int(s / least), num_layers[name] // num_ranks)) for name, s in seconds.items()}


def modality_placements(
    model: ModelSpec, costs: CostModel, num_ranks: int, typical: Mapping[str, Sequence[int]]
) -> dict[str, ModulePlacement]:
    """Sizes and segments of all modules by the paper's rules.

    Parameters
    ----------
    typical : mapping
        Per module the instance lengths of a full microbatch; one that has none takes whole microbatches, once over the
        ranks. The last module is the backbone and takes whole microbatches unless it reads videos.
    """
    sizes: dict[str, int | None] = {}
    seconds = {}
    for module in model.modules:
        layers, lengths = len(module.flat_layers), typical[module.name]
        if not lengths:
            sizes[module.name], seconds[module.name] = None, 0.0
        elif module.reads in ("sequence", "text"):
            # Documents of one pack pass through the backbone together.
            sizes[module.name] = None
            seconds[module.name] = _seconds(costs, module.name, layers, Workload(tuple(lengths)))
        else:
            choice = sub_microbatch_size(costs, module.name, layers, lengths)
            sizes[module.name], seconds[module.name] = choice.chosen, choice.seconds
    counts = segment_counts(seconds, {m.name: len(m.flat_layers) for m in model.modules}, num_ranks)
    return {name: ModulePlacement(counts[name], sizes[name]) for name in counts}


def even_layout(
    model: ModelSpec, num_ranks: int, placements: Mapping[str, ModulePlacement], load: LayerLoad, rounds: int = 200
) -> Layout:
    """Separate the modules, then balance the total loads of the ranks.

    If layers do not divide by ``ranks x segments``, boundaries move by one layer while that decreases the sum of the
    squared rank loads. Ties are broken by the sum of the squared chunk loads.

    Raises
    ------
    InputError
        A module has fewer layers than chunks.
    """
    layout = separate(model, num_ranks, placements, load)
    weights = {m.name: [load(m.name, layer) for layer in m.flat_layers] for m in model.modules}
    cuts = {
        m.name: [layout.chunks[c].layers[0] for c in layout.chunks_of(m.name)] + [len(m.flat_layers)]
        for m in model.modules
    }
    of_rank = [0.0] * num_ranks
    for name, bounds in cuts.items():
        for j, (a, b) in enumerate(pairwise(bounds)):
            of_rank[j % num_ranks] += sum(weights[name][a:b])
    total = sum(of_rank) or 1.0
    for _ in range(rounds):
        best = (-1e-9 * total * total, "", 0, 0)
        for name, bounds in cuts.items():
            for i in range(1, len(bounds) - 1):
                for step in (-1, 1):
                    gain = _gain(weights[name], bounds, i, step, of_rank, num_ranks)
                    if gain is not None and gain < best[0]:
                        best = (gain, name, i, step)
        if not best[1]:
            break
        _, name, i, step = best
        moved = weights[name][cuts[name][i] - (step < 0)]
        to, giver = ((i - 1), i) if step > 0 else (i, i - 1)
        of_rank[to % num_ranks] += moved
        of_rank[giver % num_ranks] -= moved
        cuts[name][i] += step
    chunks = tuple(
        Chunk(name, (a, b - 1), j % num_ranks)
        for name, bounds in cuts.items()
        for j, (a, b) in enumerate(pairwise(bounds))
    )
    return msgspec.structs.replace(layout, chunks=chunks)


def _gain(
    weights: list[float], bounds: list[int], i: int, step: int, of_rank: list[float], num_ranks: int
) -> float | None:
    """Return the change of the sum of squares when boundary ``i`` moves by one layer. None: a chunk would be empty."""
    if not bounds[i - 1] < bounds[i] + step < bounds[i + 1]:
        return None
    moved = weights[bounds[i] - (step < 0)]
    to, giver = ((i - 1), i) if step > 0 else (i, i - 1)
    if to % num_ranks == giver % num_ranks:
        return None
    a, b = of_rank[to % num_ranks], of_rank[giver % num_ranks]
    ranks = (a + moved) ** 2 + (b - moved) ** 2 - a * a - b * b
    c, d = sum(weights[bounds[to] : bounds[to + 1]]), sum(weights[bounds[giver] : bounds[giver + 1]])
    return ranks + ((c + moved) ** 2 + (d - moved) ** 2 - c * c - d * d)


def typical_lengths(model: ModelSpec, groups: Sequence[Sequence[Sample]]) -> dict[str, tuple[int, ...]]:
    """Return the instance lengths of the fullest microbatch by module, to measure sizes.

    For modules that read sequences or text, this is the microbatch with the median work. Unused modules get no lengths.
    """
    out: dict[str, tuple[int, ...]] = {}
    for module in model.modules:
        each = [tuple(joined(*(module.instance_lengths(s) for s in group))) for group in groups]
        each = [lengths for lengths in each if lengths]
        if not each:
            out[module.name] = ()
        elif module.reads in ("sequence", "text"):
            out[module.name] = sorted(each, key=sum)[len(each) // 2]
        else:
            longest = max(each, key=len)
            median = int(statistics.median(n for lengths in each for n in lengths))
            out[module.name] = (median,) * len(longest)
    return out
