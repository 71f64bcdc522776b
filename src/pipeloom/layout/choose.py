"""Choose a layout by planning sampled iterations under many layouts (extends DIP §4).

The search starts from DIP's rules and changes one sub-microbatch size or number of segments at a time while that
helps. It also tries other types of layouts: one chain of stages cut by time, and encoders replicated on every rank.
All plans include memory limits and strategies, as in training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from pipeloom.cost import CostModel, between_s
from pipeloom.cost.fits import FloatArray
from pipeloom.errors import InfeasibleError, NothingFoundError
from pipeloom.layout import (
    LayerLoad,
    ModulePlacement,
    chain_of_stages,
    even_layout,
    modality_placements,
    replicated,
    separate,
)
from pipeloom.layout.layouts import by_count, chunk_counts, with_encoder_dp, with_modules
from pipeloom.layout.links import closer, links_differ, neighbors, on_ranks, rank_distances
from pipeloom.search import Budget, OrderRule, SearchParams, solve_assignable
from pipeloom.search.params import DEFAULTS
from pipeloom.spec import Layout, ModelSpec
from pipeloom.taskgraph import NS_PER_S, Assignable, IntArray
from pipeloom.timeline import assignable_bound

CHAIN, _ENCODER_DP = "one chain", "; encoder data parallelism"
TRIAL = Budget(seconds=0.15, clock="cpu")
"""Search budget for each layout and iteration during the comparison."""
FINAL = Budget(seconds=1.0, clock="cpu")
"""Search budget to plan the best layouts again."""
MOST_ENCODER_DP_CHAINS = 4
"""Number of chains, those with the lowest bounds, that are tried with encoder data parallelism."""
NEAR, MOST_NEAR = 1.05, 5
"""Factor of the best time within which layouts are planned again, and the maximum number of these layouts."""
HOPELESS = 1.01
"""Factor of the best time above which a layout is ruled out by an estimate of its time."""


class LayoutDraft(NamedTuple):
    """A layout to try, and the priority rule that was found with it."""

    name: str
    layout: Layout
    rule: OrderRule | None = None


@dataclass(frozen=True, slots=True)
class LayoutEvaluation:
    """The planned time of a layout on the sampled iterations.

    Attributes
    ----------
    seconds : float
        Mean planned iteration time; infinite if the layout does not fit. A layout is ruled out when bounds and the
        plans so far exceed the best time. Then ``ruled_out`` is true, and this is a lower bound.
    bound_s : float
        Mean lower bound of the iteration time.
    problem : str
        Why the layout does not fit; empty if it does.
    rule : OrderRule or None
        Priority rule that was found with the layout.
    """

    name: str
    layout: Layout
    seconds: float
    bound_s: float
    ruled_out: bool = False
    problem: str = ""
    rule: OrderRule | None = None

    @property
    def planned_s(self) -> float:
        """The planned seconds; infinite if the layout was ruled out or does not fit."""
        return float("inf") if self.ruled_out else self.seconds

    @property
    def draft(self) -> LayoutDraft:
        """The layout and rule, to be evaluated again."""
        return LayoutDraft(self.name, self.layout, self.rule)


@dataclass(frozen=True)
class EncoderDp:
    """Encoder data parallelism over tensor ranks: the modules that may use it, and layer costs under it.

    Attributes
    ----------
    names : tuple of str
        Modules that use it together or not at all.
    costs : CostModel
        Costs under encoder data parallelism.
    load : callable
        Seconds of a layer on typical data under encoder data parallelism.
    """

    names: tuple[str, ...]
    costs: CostModel
    load: LayerLoad


@dataclass(frozen=True)
class LayoutProblem:
    """The problem for which a layout is chosen: a model and a few sampled iterations.

    Attributes
    ----------
    load : callable
        Seconds of a layer on typical data. Ranks are balanced by it.
    typical : mapping
        Instance lengths of a full microbatch by module.
    graphs : callable
        Return the task graphs of the iterations under a layout. Raises InfeasibleError if the weights do not fit.
    after_s : callable
        Return the seconds that a layout takes after the last backward.
    update_ns : callable or None
        Return the time that each rank of a layout needs after its last task, to reduce gradients and update weights.
        None: 0.
    encoder_dp : EncoderDp or None
        Encoder data parallelism to try. None: none is tried.
    """

    model: ModelSpec
    num_ranks: int
    costs: CostModel
    load: LayerLoad
    typical: Mapping[str, Sequence[int]]
    graphs: Callable[[Layout], Sequence[Assignable]]
    after_s: Callable[[Layout], float]
    encoder_dp: EncoderDp | None = None
    update_ns: Callable[[Layout], IntArray] | None = None


def search_layouts(
    sampled: LayoutProblem,
    *,
    trial: Budget = TRIAL,
    final: Budget | None = None,
    seed: int = 0,
    rounds: int = 2,
    drafts: Sequence[LayoutDraft] = (),
    on_tried: Callable[[int], None] = lambda _count: None,
) -> tuple[LayoutEvaluation, ...]:
    """Plan the sampled iterations under many layouts.

    Parameters
    ----------
    trial : Budget
        Search budget for each layout and iteration.
    final : Budget, optional
        Search budget to plan the best layouts again, since short searches of large graphs are far from their final
        result. None: they are not planned again.
    rounds : int
        Maximum number of times that each size and number of segments may change.
    drafts : sequence of LayoutDraft
        Additional layouts to try, with their rules.
    on_tried : callable, optional
        Called after every layout with the number of layouts tried.

    Returns
    -------
    tuple of LayoutEvaluation
        Results, the fastest layout first.

    Raises
    ------
    InfeasibleError
        No layout that was tried fits.
    """
    model, num_ranks, load = sampled.model, sampled.num_ranks, sampled.load
    start = modality_placements(model, sampled.costs, num_ranks, sampled.typical)
    known: dict[str, LayoutEvaluation] = {}
    distances = rank_distances(sampled.costs, num_ranks)
    order = neighbors(distances)

    def tried(name: str, layout: Layout, rule: OrderRule | None = None) -> LayoutEvaluation:
        if name not in known:
            draft = LayoutDraft(name, layout, rule)
            known[name] = evaluate_layout(sampled, draft, trial, seed, _best_s(known.values()))
            on_tried(len(known))
        return known[name]

    def placed(name: str, layout: Layout) -> LayoutEvaluation:
        return tried(name, on_ranks(layout, order))

    def separated(places: Mapping[str, ModulePlacement]) -> LayoutEvaluation:
        return placed(placement_name(places), even_layout(model, num_ranks, places, load))

    places = _improved(sampled, start, separated, rounds)
    # Encoder data parallelism first: where it helps, its times rule out most other layouts by their bounds.
    encoder_dp = () if sampled.encoder_dp is None else _encoder_dp_layouts(sampled, sampled.encoder_dp, places, placed)
    for name, layout in itertools.chain(encoder_dp, _other_layouts(sampled, places, start)):
        placed(name, layout)
    for draft in drafts:
        tried(draft.name, draft.layout, draft.rule)
    given = fitting(known.values())
    chains = [t for t in given if t.name.startswith(CHAIN) and t not in nearest(given)]
    for draft in closer_drafts([*nearest(given), *chains], distances):
        tried(*draft)
    fastest = fitting(known.values())
    return tuple(fastest) if final is None else nearest_again(sampled, fastest, final, seed)


def _other_layouts(
    sampled: LayoutProblem, places: Mapping[str, ModulePlacement], start: Mapping[str, ModulePlacement]
) -> Iterator[tuple[str, Layout]]:
    """Yield chains of stages, layouts with replicated encoders, and layouts with equal numbers of layers."""
    model, num_ranks, load = sampled.model, sampled.num_ranks, sampled.load
    # The same numbers of chunks as for interleaved schedules; bounds rule out most of them without planning.
    for v in chunk_counts(num_ranks, model.modules):
        yield _chain_name(v), chain_of_stages(model, num_ranks, v, load)
    if num_ranks > 1:
        for module in model.modules[:-1]:
            layout = replicated(even_layout(model, num_ranks, places, load), [module.name])
            for size in dict.fromkeys((places[module.name].sub_microbatch, 4, 2, 1)):
                if size is not None:
                    name = f"{placement_name(places)}; {module.name} replicated, {size} each"
                    yield name, with_modules(layout, [module.name], sub_microbatch=size)
    # As published: the sizes and segments of the rules with equal numbers of layers. Where memory is limited, equal
    # numbers may suit other sizes too.
    for sizes in (start, places):
        yield f"{placement_name(sizes)}, layers by number", separate(model, num_ranks, sizes, by_count)


def _chain_name(chunks_per_rank: int) -> str:
    return f"{CHAIN}, {chunks_per_rank} chunks a rank"


def _encoder_dp_layouts(
    sampled: LayoutProblem,
    encoder_dp: EncoderDp,
    places: Mapping[str, ModulePlacement],
    placed: Callable[[str, Layout], LayoutEvaluation],
) -> Iterator[tuple[str, Layout]]:
    """Improve a separated layout with encoder data parallelism, and yield other layouts with it.

    These are the chains of stages with the lowest bounds and a layout with replicated modules.
    """
    model, num_ranks, names = sampled.model, sampled.num_ranks, encoder_dp.names

    def separated(places: Mapping[str, ModulePlacement]) -> LayoutEvaluation:
        layout = with_encoder_dp(even_layout(model, num_ranks, places, encoder_dp.load), names)
        return placed(f"{placement_name(places)}{_ENCODER_DP}", layout)

    separated(places)
    rule = modality_placements(model, encoder_dp.costs, num_ranks, sampled.typical)
    found = _improved(sampled, rule, separated, 1)

    chains = []
    for v in chunk_counts(num_ranks, model.modules):
        layout = with_encoder_dp(chain_of_stages(model, num_ranks, v, encoder_dp.load), names)
        # With an incumbent of 0 s, this computes only the bound.
        least = evaluate_layout(sampled, LayoutDraft("", layout), Budget(evaluations=1), 0, incumbent_s=0.0)
        chains.append((least.bound_s, v, layout))
    for _, v, layout in sorted(chains, key=lambda each: each[:2])[:MOST_ENCODER_DP_CHAINS]:
        yield f"{_chain_name(v)}{_ENCODER_DP}", layout
    if num_ranks > 1:
        layout = with_encoder_dp(replicated(even_layout(model, num_ranks, found, encoder_dp.load), names), names)
        yield f"{placement_name(found)}; {', '.join(names)} replicated{_ENCODER_DP}", layout


def _improved(
    sampled: LayoutProblem,
    start: Mapping[str, ModulePlacement],
    tried: Callable[[Mapping[str, ModulePlacement]], LayoutEvaluation],
    rounds: int,
) -> Mapping[str, ModulePlacement]:
    """Change the size or segments of one module at a time while that helps, for at most ``rounds`` rounds."""
    places, best = start, tried(start)
    for _ in range(rounds):
        before = best
        for module in sampled.model.modules:  # the best change of this module alone
            for option in list(_changes(sampled, module.name, places, start)):
                trial_of = tried(option)
                if trial_of.planned_s < best.planned_s:
                    best, places = trial_of, option
        if best is before:
            break
    return places


def closer_drafts(trials: Sequence[LayoutEvaluation], distances: FloatArray) -> Iterator[LayoutDraft]:
    """Yield the same layouts with chunks on other ranks; nothing if all links are equal."""
    if links_differ(distances):
        for trial in trials:
            for words, layout in closer(trial.layout, distances):
                rule = None if trial.rule is None else trial.rule.moved_to(layout)
                yield LayoutDraft(f"{trial.name}; {words}", layout, rule)


def fitting(trials: Iterable[LayoutEvaluation]) -> list[LayoutEvaluation]:
    """Return the evaluations, fastest first. Raise `NothingFoundError` if no layout fits."""
    order = in_order(trials)
    if order[0].seconds == float("inf"):
        raise NothingFoundError(f"none of {len(order)} layouts tried fits: {order[0].problem}")
    return order


def nearest(order: Sequence[LayoutEvaluation]) -> list[LayoutEvaluation]:
    """Return the evaluations close to the fastest one."""
    return [t for t in order if t.seconds <= NEAR * order[0].seconds][:MOST_NEAR]


def nearest_again(
    sampled: LayoutProblem, order: Sequence[LayoutEvaluation], budget: Budget, seed: int
) -> tuple[LayoutEvaluation, ...]:
    """Plan the best layouts again, and keep the faster plan of each."""
    near, again = nearest(order), list[LayoutEvaluation]()
    for short in near:
        long = evaluate_layout(sampled, short.draft, budget, seed, _best_s(again))
        # A long search that was stopped early has no plan.
        again.append(short if long.ruled_out or short.planned_s < long.seconds else long)
    return (*in_order(again), *(t for t in order if t not in near))


def _best_s(trials: Iterable[LayoutEvaluation]) -> float:
    """Return the time of the fastest plan; infinite if there is none."""
    return min((t.planned_s for t in trials), default=float("inf"))


def in_order(trials: Iterable[LayoutEvaluation]) -> list[LayoutEvaluation]:
    return sorted(trials, key=lambda t: (t.ruled_out, t.seconds))


def evaluate_layout(
    sampled: LayoutProblem, draft: LayoutDraft, trial: Budget, seed: int, incumbent_s: float = float("inf")
) -> LayoutEvaluation:
    """Plan the sampled iterations under one layout.

    Stop when the mean of the plans so far and the lower bounds of the other iterations reaches ``incumbent_s``. Also
    stop when it would be `HOPELESS` times as long if the other plans were as far above their bounds as those so far.
    """
    name, layout, rule = draft
    params = DEFAULTS if rule is None else SearchParams(rules=(rule,))
    after = sampled.after_s(layout)
    update = np.zeros(layout.num_ranks, np.int64) if sampled.update_ns is None else sampled.update_ns(layout)
    try:
        graphs = sampled.graphs(layout)
        bounds = [(assignable_bound(graph).ns + int(update.min())) / NS_PER_S + after for graph in graphs]
        bound_s = sum(bounds) / len(bounds)
        known = list(bounds)
        for i, graph in enumerate(graphs):
            above = sum(known[:i]) / sum(bounds[:i]) if sum(bounds[:i]) else 1.0
            expected = sum(known[:i]) + above * sum(bounds[i:])
            if sum(known) >= incumbent_s * len(known) or expected >= HOPELESS * incumbent_s * len(known):
                return LayoutEvaluation(name, layout, sum(known) / len(known), bound_s, ruled_out=True, rule=rule)
            found = solve_assignable(graph, budget=trial, seed=seed + i, params=params)
            end = np.zeros_like(update)
            np.maximum.at(end, found.assignable.graph.rank, found.solution.timeline.end_ns)
            known[i] = int((end + update).max()) / NS_PER_S + after
    except InfeasibleError as error:
        return LayoutEvaluation(name, layout, float("inf"), float("inf"), problem=str(error), rule=rule)
    return LayoutEvaluation(name, layout, sum(known) / len(known), bound_s, rule=rule)


def placement_name(places: Mapping[str, ModulePlacement]) -> str:
    """Describe sizes and segments: ``vision 12 x2, lm all x1``."""
    words = (f"{name} {p.sub_microbatch or 'all'} x{p.segments}" for name, p in places.items())
    return ", ".join(words)


def _changes(
    sampled: LayoutProblem, name: str, places: Mapping[str, ModulePlacement], start: Mapping[str, ModulePlacement]
) -> Iterator[dict[str, ModulePlacement]]:
    """Yield placements with other segments or sizes of one module."""
    here, most = places[name], len(sampled.model.module(name).flat_layers) // sampled.num_ranks
    rule = start[name].sub_microbatch
    segments = {here.segments + d for d in (-2, -1, 1, 2)} | {1}
    for k in sorted(segments):
        if 1 <= k <= most and k != here.segments:
            yield {**places, name: msgspec.structs.replace(here, segments=k)}
    if rule is not None:
        for size in (max(1, rule // 2), rule, round(rule * 1.5), rule * 2, None):
            if size != here.sub_microbatch:
                yield {**places, name: msgspec.structs.replace(here, sub_microbatch=size)}


def ring_seconds(layout: Layout, gradient_bytes: Mapping[str, int], costs: CostModel) -> float:
    """Return the seconds of a ring all-reduce over all pipeline ranks of the gradients of replicated modules.

    Parameters
    ----------
    gradient_bytes : mapping
        Gradient bytes of every module on one rank.
    """
    total = sum(gradient_bytes[m.name] for m in layout.modules if m.on_ranks == "replicated" and not m.frozen)
    if not total or layout.num_ranks == 1:
        return 0.0
    ring = range(layout.num_ranks)
    slowest = max(between_s(costs, total // len(ring), rank, (rank + 1) % len(ring)) for rank in ring)
    return 2 * (len(ring) - 1) * slowest
