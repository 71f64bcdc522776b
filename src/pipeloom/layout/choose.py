"""Choose a layout by planning sampled iterations under many (`dip.txt` §4, and beyond its rules).

The paper's rules give a start. From there sub-microbatch sizes and segments change one at a time as long as
that helps; whole other shapes are tried too: one chain of stages cut by time, and encoders that lie whole on
every rank. Everything is planned with memory and with strategies, as it will be in training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

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
from pipeloom.layout.layouts import by_count, chunk_counts, dealt
from pipeloom.layout.links import closer, links_differ, neighbours, on_ranks, rank_distances
from pipeloom.search import Deadline, Evaluations, OrderRule, SearchParams, StoppingRule, solve_assignable
from pipeloom.search.params import DEFAULTS
from pipeloom.spec import Layout, ModelSpec
from pipeloom.taskgraph import NS_PER_S, Assignable
from pipeloom.timeline import assignable_bound

CHAIN, _DEALT = "one chain", "; instances dealt"
TRIAL = Deadline(0.25, "cpu")
"""Search for each layout and iteration while layouts are compared."""
FINAL = Deadline(1.0, "cpu")
"""The same for those that came nearest, which are planned once more."""
MOST_DEALT_CHAINS = 4
"""Chains that are tried with dealt instances: those of the least bounds."""
NEAR, MOST_NEAR = 1.05, 5
"""Layouts within so many times the best's seconds are near it; so many of them are planned once more at most."""


class LayoutDraft(NamedTuple):
    """A layout to try, and the rule that was found with it."""

    name: str
    layout: Layout
    rule: OrderRule | None = None


@dataclass(frozen=True, slots=True)
class LayoutEvaluation:
    """What a layout costs on the sampled iterations.

    Attributes
    ----------
    seconds : float
        Mean planned iteration; infinite where it does not fit. A layout that its lower bound rules out, or its bound
        and the first plans, is not planned further: it is given what was known, and ``ruled_out`` is true.
    bound_s : float
        Mean lower bound of its iterations.
    problem : str
        Why it does not fit, or nothing.
    rule : OrderRule or None
        That was found with the layout.
    """

    name: str
    layout: Layout
    seconds: float
    bound_s: float
    ruled_out: bool = False
    problem: str = ""
    rule: OrderRule | None = None

    @property
    def draft(self) -> LayoutDraft:
        """What was tried, to be tried again."""
        return LayoutDraft(self.name, self.layout, self.rule)


@dataclass(frozen=True)
class Dealing:
    """Modules whose instances may be dealt to the tensor-parallel ranks of a pipeline rank, and what layers cost then.

    Attributes
    ----------
    names : tuple of str
        All of them are dealt, or none.
    costs : CostModel
        With these dealt.
    load : callable
        Seconds of a layer on typical data, with these dealt.
    """

    names: tuple[str, ...]
    costs: CostModel
    load: LayerLoad


@dataclass(frozen=True)
class Sampled:
    """What layouts are tried on: a model, and a few iterations like those of the training to come.

    Attributes
    ----------
    load : callable
        Seconds of a layer on typical data; ranks are made even by it.
    typical : mapping
        Per module the instance lengths of a full microbatch.
    graphs : callable
        Task graphs of the iterations under a layout. Raises InfeasibleError where the weights do not fit.
    after_s : callable
        Seconds that a layout takes after the last backward.
    dealing : Dealing or None
        None: no module is tried so.
    """

    model: ModelSpec
    num_ranks: int
    costs: CostModel
    load: LayerLoad
    typical: Mapping[str, Sequence[int]]
    graphs: Callable[[Layout], Sequence[Assignable]]
    after_s: Callable[[Layout], float]
    dealing: Dealing | None = None


def search_layouts(
    sampled: Sampled,
    *,
    trial: StoppingRule = TRIAL,
    final: StoppingRule | None = None,
    seed: int = 0,
    rounds: int = 2,
    drafts: Sequence[LayoutDraft] = (),
    on_tried: Callable[[int], None] = lambda _count: None,
) -> tuple[LayoutEvaluation, ...]:
    """Plan the sampled iterations under many layouts.

    Parameters
    ----------
    trial : StoppingRule
        Search for each layout and iteration.
    final : StoppingRule, optional
        Search for the layouts that came nearest, once more: short trials of large graphs are far from what a full
        search finds. None: ``trial`` decides.
    rounds : int
        Times that every size and count of segments may change.
    drafts : sequence of LayoutDraft
        Other layouts to try, with their rules.
    on_tried : callable, optional
        Told after every layout how many were tried.

    Returns
    -------
    tuple of LayoutEvaluation
        Fastest first; the first is the one to take.

    Raises
    ------
    InfeasibleError
        Nothing that was tried fits.
    """
    model, num_ranks, load = sampled.model, sampled.num_ranks, sampled.load
    start = modality_placements(model, sampled.costs, num_ranks, sampled.typical)
    known: dict[str, LayoutEvaluation] = {}
    distances = rank_distances(sampled.costs, num_ranks)
    order = neighbours(distances)

    def tried(name: str, layout: Layout, rule: OrderRule | None = None) -> LayoutEvaluation:
        if name not in known:
            best = min((t.seconds for t in known.values() if not t.ruled_out), default=float("inf"))
            known[name] = evaluate_layout(sampled, LayoutDraft(name, layout, rule), trial, seed, best)
            on_tried(len(known))
        return known[name]

    def placed(name: str, layout: Layout) -> LayoutEvaluation:
        return tried(name, on_ranks(layout, order))

    def separated(places: Mapping[str, ModulePlacement]) -> LayoutEvaluation:
        return placed(placement_name(places), even_layout(model, num_ranks, places, load))

    places = _improved(sampled, start, separated, rounds)
    # Dealt ones first: where dealing pays, their seconds rule most of the others out by bounds.
    of_dealt = () if sampled.dealing is None else _dealt_shapes(sampled, sampled.dealing, places, placed)
    for name, layout in itertools.chain(of_dealt, _other_shapes(sampled, places, start)):
        placed(name, layout)
    for draft in drafts:
        tried(draft.name, draft.layout, draft.rule)
    given = _fitting(known.values())
    chains = [t for t in given if t.name.startswith(CHAIN) and t not in nearest(given)]
    for draft in closer_drafts([*nearest(given), *chains], distances):
        tried(*draft)
    return _nearest_again(sampled, _fitting(known.values()), final, seed)


def _other_shapes(
    sampled: Sampled, places: Mapping[str, ModulePlacement], start: Mapping[str, ModulePlacement]
) -> Iterator[tuple[str, Layout]]:
    """Chains of stages, encoders whole on every rank, and layers by number."""
    model, num_ranks, load = sampled.model, sampled.num_ranks, sampled.load
    # Every number of chunks that interleaved schedules are tried with; bounds rule most of them out unplanned.
    for v in chunk_counts(num_ranks, model.modules):
        yield _chain_name(v), chain_of_stages(model, num_ranks, v, load)
    if num_ranks > 1:
        for module in model.modules[:-1]:
            layout = replicated(even_layout(model, num_ranks, places, load), [module.name])
            for size in {places[module.name].sub_microbatch, 4, 2, 1}:
                if size is not None:
                    name = f"{placement_name(places)}; {module.name} replicated, {size} each"
                    yield name, resized(layout, module.name, size)
    # As published: the rules' sizes and segments with as many layers everywhere. Where memory is tight, that may suit
    # other sizes too.
    for sizes in (start, places):
        yield f"{placement_name(sizes)}, layers by number", separate(model, num_ranks, sizes, by_count)


def _chain_name(chunks_per_rank: int) -> str:
    return f"{CHAIN}, {chunks_per_rank} chunks a rank"


def _dealt_shapes(
    sampled: Sampled,
    dealing: Dealing,
    places: Mapping[str, ModulePlacement],
    placed: Callable[[str, Layout], LayoutEvaluation],
) -> Iterator[tuple[str, Layout]]:
    """Try modules in segments of their own with dealt instances, and give other shapes with these.

    That is the chains of stages with the least bounds, and dealt modules whole on every rank.
    """
    model, num_ranks, names = sampled.model, sampled.num_ranks, dealing.names

    def separated(places: Mapping[str, ModulePlacement]) -> LayoutEvaluation:
        layout = dealt(even_layout(model, num_ranks, places, dealing.load), names)
        return placed(f"{placement_name(places)}{_DEALT}", layout)

    separated(places)
    rule = modality_placements(model, dealing.costs, num_ranks, sampled.typical)
    found = _improved(sampled, rule, separated, 1)

    chains = []
    for v in chunk_counts(num_ranks, model.modules):
        layout = dealt(chain_of_stages(model, num_ranks, v, dealing.load), names)
        # Nothing is faster than at once, so that this only bounds it.
        least = evaluate_layout(sampled, LayoutDraft("", layout), Evaluations(1), 0, incumbent_s=0.0)
        chains.append((least.bound_s, v, layout))
    for _, v, layout in sorted(chains, key=lambda each: each[:2])[:MOST_DEALT_CHAINS]:
        yield f"{_chain_name(v)}{_DEALT}", layout
    if num_ranks > 1:
        layout = dealt(replicated(even_layout(model, num_ranks, found, dealing.load), names), names)
        yield f"{placement_name(found)}; {', '.join(names)} replicated{_DEALT}", layout


def _improved(
    sampled: Sampled,
    start: Mapping[str, ModulePlacement],
    tried: Callable[[Mapping[str, ModulePlacement]], LayoutEvaluation],
    rounds: int,
) -> Mapping[str, ModulePlacement]:
    """Change one module's size or segments at a time, as long as that helps and so many rounds at most."""
    places, best = start, tried(start)
    for _ in range(rounds):
        before = best.seconds
        for module in sampled.model.modules:  # the best of all that change this one alone
            for option in list(_changes(sampled, module.name, places, start)):
                trial_of = tried(option)
                if trial_of.seconds < best.seconds and not trial_of.ruled_out:
                    best, places = trial_of, option
        if best.seconds >= before:
            break
    return places


def closer_drafts(trials: Sequence[LayoutEvaluation], distances: FloatArray) -> Iterator[LayoutDraft]:
    """What was tried, with the same chunks on other ranks; nothing where all ranks are as close."""
    if links_differ(distances):
        for trial in trials:
            for words, layout in closer(trial.layout, distances):
                rule = None if trial.rule is None else trial.rule.moved_to(layout)
                yield LayoutDraft(f"{trial.name}; {words}", layout, rule)


def _fitting(trials: Iterable[LayoutEvaluation]) -> list[LayoutEvaluation]:
    """In order; refused where none fits."""
    order = in_order(trials)
    if order[0].seconds == float("inf"):
        raise NothingFoundError(f"none of {len(order)} layouts tried fits: {order[0].problem}")
    return order


def nearest(order: Sequence[LayoutEvaluation]) -> list[LayoutEvaluation]:
    """Those that came nearest to the first."""
    return [t for t in order if t.seconds <= NEAR * order[0].seconds][:MOST_NEAR]


def _nearest_again(
    sampled: Sampled, order: Sequence[LayoutEvaluation], final: StoppingRule | None, seed: int
) -> tuple[LayoutEvaluation, ...]:
    """Plan the layouts that came nearest once more, if they are to be."""
    if final is None:
        return tuple(order)
    near = nearest(order)
    again = [_better(t, evaluate_layout(sampled, t.draft, final, seed)) for t in near]
    return (*in_order(again), *(t for t in order if t not in near))


def _better(short: LayoutEvaluation, long: LayoutEvaluation) -> LayoutEvaluation:
    return short if not short.ruled_out and short.seconds < long.seconds else long


def in_order(trials: Iterable[LayoutEvaluation]) -> list[LayoutEvaluation]:
    return sorted(trials, key=lambda t: (t.ruled_out, t.seconds))


def rank_drafts(
    sampled: Sampled,
    drafts: Sequence[LayoutDraft],
    *,
    short: StoppingRule,
    trial: StoppingRule,
    seed: int = 0,
    on_tried: Callable[[int], None] = lambda _count: None,
) -> tuple[LayoutEvaluation, ...]:
    """Plan the sampled iterations under layouts that came with rules: all for a short time, the nearest once more.

    Raises
    ------
    InfeasibleError
        None of them fits.
    """
    made = []
    for draft in drafts:
        made.append(evaluate_layout(sampled, draft, short, seed))
        on_tried(len(made))
    return _nearest_again(sampled, _fitting(made), trial, seed)


def evaluate_layout(
    sampled: Sampled, draft: LayoutDraft, trial: StoppingRule, seed: int, incumbent_s: float = float("inf")
) -> LayoutEvaluation:
    """Plan the sampled iterations under one layout.

    Stop where the plans so far, and lower bounds for the other iterations, are already beyond ``incumbent_s``.
    """
    name, layout, rule = draft
    params = DEFAULTS if rule is None else SearchParams(rules=(rule,))
    after = sampled.after_s(layout)
    try:
        graphs = sampled.graphs(layout)
        bounds = [assignable_bound(graph).ns / NS_PER_S + after for graph in graphs]
        bound_s = sum(bounds) / len(bounds)
        known = list(bounds)
        for i, graph in enumerate(graphs):
            if sum(known) / len(known) >= incumbent_s:
                return LayoutEvaluation(name, layout, sum(known) / len(known), bound_s, ruled_out=True, rule=rule)
            found = solve_assignable(graph, budget=trial, seed=seed + i, params=params).solution
            known[i] = found.timeline.makespan_ns / NS_PER_S + after
    except InfeasibleError as error:
        return LayoutEvaluation(name, layout, float("inf"), float("inf"), problem=str(error), rule=rule)
    return LayoutEvaluation(name, layout, sum(known) / len(known), bound_s, rule=rule)


def placement_name(places: Mapping[str, ModulePlacement]) -> str:
    """Sizes and segments in words: ``vision 12 x2, lm all x1``."""
    words = (f"{name} {p.sub_microbatch or 'all'} x{p.segments}" for name, p in places.items())
    return ", ".join(words)


def resized(layout: Layout, name: str, size: int) -> Layout:
    """The same layout with one module in sub-microbatches of so many instances."""
    modules = tuple(msgspec.structs.replace(m, sub_microbatch=size) if m.name == name else m for m in layout.modules)
    return msgspec.structs.replace(layout, modules=modules)


def _changes(
    sampled: Sampled, name: str, places: Mapping[str, ModulePlacement], start: Mapping[str, ModulePlacement]
) -> Iterator[dict[str, ModulePlacement]]:
    """Other segments and sizes of one module."""
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
    """Seconds in which a ring of all pipeline ranks adds up the gradients of replicated modules.

    Parameters
    ----------
    gradient_bytes : mapping
        Of every module, on one rank.
    """
    total = sum(gradient_bytes[m.name] for m in layout.modules if m.on_ranks == "replicated" and not m.frozen)
    if not total or layout.num_ranks == 1:
        return 0.0
    ring = range(layout.num_ranks)
    slowest = max(between_s(costs, total // len(ring), rank, (rank + 1) % len(ring)) for rank in ring)
    return 2 * (len(ring) - 1) * slowest
