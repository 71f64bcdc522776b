"""The joined planner against the best of each paper's own system, on that paper's workloads."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean
from typing import NamedTuple

from benchmarks import joint
from pipeloom.collector import collector_paused
from pipeloom.iteration import batch_of
from pipeloom.layout.cooptimize import cooptimize, graph_of
from pipeloom.packing import PackingSpec, budget_tokens
from pipeloom.planner import PlanningProblem
from pipeloom.planner.joint import decide
from pipeloom.search import Budget, SearchParams, solve
from pipeloom_lab.adaptis.systems import ChainResult
from pipeloom_lab.reproduce.adaptis import setups as adaptis
from pipeloom_lab.reproduce.dip import runs
from pipeloom_lab.reproduce.dip.setups import SETUPS, PaperSetup
from pipeloom_lab.reproduce.part import Options
from pipeloom_lab.reproduce.pipetune import setups as pipetune

MOST_SLOWER, LEAST_GAIN = 0.005, 0.03
"""On any workload; and in the mean of all."""
_SEEDS = (0, 1, 2)
_ADAPTIS = (
    ("Gemma", "Medium"),
    ("DeepSeek", "Medium"),
    ("Nemotron-H", "Medium"),
    ("DeepSeek", "Large"),
    ("Nemotron-H", "Large"),
)
_ADAPTIS_TOKENS, _ADAPTIS_ROUNDS = 4096, 4
ADAPTIS_SEARCH = 4.0
"""Multiplies the search time for a placement, as in AdaPtis' evaluation."""


class Comparison(NamedTuple):
    """One workload: seconds of an iteration under ours and under the paper's own, and which of these that is."""

    workload: str
    ours_s: float
    own_s: float
    own: str

    @property
    def gain(self) -> float:
        """How much longer the paper's own takes."""
        return self.own_s / self.ours_s - 1


def compare(search_s: float = 1.0, seeds: tuple[int, ...] = _SEEDS) -> Iterator[Comparison]:
    """Every workload, as it has been measured."""
    options = Options(search_s=search_s, seeds=seeds, iterations=1)
    for label in SETUPS:
        yield dip(label, options)
    for size in joint.SIZES:
        for mixture in pipetune.MIXTURES:
            yield packed(size, mixture)
    for family, size in _ADAPTIS:
        yield cooptimized(family, size, options)


@collector_paused()
def dip(label: str, options: Options) -> Comparison:
    """DIP's samples, packed anew in its memory and with its context, under the layout that planning chose."""
    setup = SETUPS[label]
    numbers = runs.iterations(options, 1)
    found = runs.best_form(setup, numbers, options.search_s, runs.SEARCHED)
    if found is None:
        raise AssertionError(f"{label}: no form of DIP fits")
    ours = mean(joined_s(setup, seed, number, options.search_s) for seed, number in numbers)
    return Comparison(label, ours, found[1], found[0])


def joined_s(setup: PaperSetup, seed: int, number: int, search_s: float) -> float:
    """Seconds of an iteration whose samples are packed and ordered together, in so many CPU seconds."""
    setting, groups = setup.setting, setup.groups(seed, number)
    # A microbatch may be as large as the largest of the paper's.
    most = max(int(budget_tokens(batch_of([group]), setting.model).sum()) for group in groups)
    packing = PackingSpec(most, "planned")
    layout = setup.layouts[0].layout
    problem = PlanningProblem(setting.model, layout, setting.costs, packing, memory=setting.memory, seed=seed)
    problem.compile_kernels()
    made = decide(problem, batch_of(groups), Budget(seconds=search_s, clock="cpu"))
    runs.refuse_faults("joined", made.graph, made.schedule, made.timeline)
    return made.ns / 1e9


def packed(size: str, mixture: str) -> Comparison:
    """PipeTune's batches, under its layout or a separate one, whichever is faster in the mean."""
    setting = pipetune.emulated(pipetune.ON_A[size])
    own, first, apart = [], [], []
    separate = joint.separate_layout(setting)
    for number in range(joint.BATCHES):
        batch = pipetune.batch_of(setting.setup, mixture, number)
        own.append(pipetune.run_batch(setting, batch, pipetune.steps_of(setting.setup)[pipetune.PIPETUNE], 0).seconds)
        first.append(joint.planned_s(setting, setting.layout, batch, "planned", setting.max_contexts))
        apart.append(joint.planned_s(setting, separate, batch, "planned", setting.max_contexts))
    workload = f"{size.upper()} {pipetune.NAMES[mixture]}"
    return Comparison(workload, min(mean(first), mean(apart)), mean(own), "PipeTune")


def cooptimized(family: str, size: str, options: Options) -> Comparison:
    """AdaPtis' model, cooptimized by ours once before training; then its order is searched as for every batch."""
    setup = adaptis.setup_of(family, size, _ADAPTIS_TOKENS, _ADAPTIS_ROUNDS)
    before_s = ADAPTIS_SEARCH * options.search_s
    rivals: list[ChainResult] = [adaptis.generated(setup, before_s)]
    if (fastest := adaptis.best_baseline(setup)) is not None:
        rivals.append(fastest)
    best = min(rivals, key=adaptis.seconds_of)
    ours = mean(_ordered_s(setup, seed, before_s, options.search_s) for seed in options.seeds)
    return Comparison(f"{family} {size}", ours, adaptis.seconds_of(best), best.name)


def _ordered_s(setup: adaptis.PaperSetup, seed: int, before_s: float, search_s: float) -> float:
    _, split = adaptis.chains(setup)
    found = cooptimize(split, budget=Budget(seconds=before_s, clock="cpu"), seed=seed)
    graph = graph_of(split, found.placement)
    params = SearchParams(rules=(found.order_rule,))
    made = solve(graph, budget=Budget(seconds=search_s, clock="cpu"), seed=seed, params=params)
    runs.refuse_faults("cooptimized", graph, made.schedule, made.timeline)
    return made.timeline.makespan_ns / 1e9


def describe(found: list[Comparison]) -> tuple[str, bool, list[list[str]]]:
    """What was found in words, whether it is what was to be reached, and a row for every workload."""
    gains = [each.gain for each in found]
    # So much slower is so much negative gain, but for parts in a hundred thousand.
    reached = min(gains) >= -MOST_SLOWER and mean(gains) >= LEAST_GAIN
    slowest = min(found, key=lambda each: each.gain)
    words = f"mean {mean(gains):+.1%}, least {slowest.gain:+.1%} ({slowest.workload})"
    rows = [[e.workload, f"{e.ours_s:.3f}", f"{e.own_s:.3f}", e.own, f"{e.gain:+.1%}"] for e in found]
    return words, reached, rows
