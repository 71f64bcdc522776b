"""How far estimates can be trusted: Fig. 11, against emulated operators and plans run on sleeping ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeloom.plan import boundary_shapes, lower
from pipeloom.runtime import step_durations
from pipeloom.runtime.measure.emulation import Emulation, replayed_ns, run_on_ranks, without_delays
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import simulate
from pipeloom.tuning import TuningSpec
from pipeloom_lab.figures import Axis, scatter_figure
from pipeloom_lab.reproduce.part import Figure, Options, Outcome, Table
from pipeloom_lab.reproduce.pipetune import setups
from pipeloom_lab.reproduce.texts import make_table

_SIZES = (1, 2, 4, 8)
"""Contexts of the largest microbatch."""
_MEAN_MS = 40
"""Of a task with the smallest microbatches, on sleeping ranks."""
_SPEC = TuningSpec("algorithm1_opened", "fixed", "clusters", "frozen")


@dataclass(frozen=True)
class _SizedRun:
    """One batch at one size of microbatches, and how much longer its tasks are when they are slept."""

    mixture: str
    batch: int
    run: setups.Run
    factor: float

    @property
    def graph(self) -> TaskGraph:
        """As it is slept: tasks longer, messages whatever they take."""
        graph = self.run.plan.graph
        longer = np.rint(graph.duration_ns * self.factor).astype(np.int64)
        return without_delays(replace(graph, duration_ns=longer))

    @property
    def estimated_s(self) -> float:
        """By tables and recurrence, in the time of the sleeping ranks."""
        return self.run.tuned.planned_ns * self.factor / 1e9


def figure_11(options: Options) -> Outcome:
    """Estimated against emulated and executed iteration times: are microbatch sizes ranked rightly?"""
    setup = setups.ON_A["3b"]
    setting = setups.emulated(setup)
    rows, points = [], {}
    slept: list[_SizedRun] = []
    for mixture in setups.MIXTURES:
        planned, real, right, pairs = [], [], 0, 0
        for number, (seed, batch) in enumerate(setups.batches(setup, mixture, options)):
            runs = [setups.run_batch(setting, batch, _SPEC, seed, contexts * setup.context) for contexts in _SIZES]
            ours = [one.tuned.planned_ns / 1e9 for one in runs]
            theirs = [one.seconds for one in runs]
            good, of = ranked_alike(ours, theirs)
            right, pairs = right + good, pairs + of
            planned += ours
            real += theirs
            if number % options.iterations == 0:  # the first batch of every seed
                factor = _MEAN_MS * 1e6 / float(runs[0].plan.graph.duration_ns.mean())
                slept += [_SizedRun(mixture, number, one, factor) for one in runs]
        points[setups.NAMES[mixture]] = (real, planned)
        errors = [abs(p / r - 1) for p, r in zip(planned, real, strict=True)]
        rows.append(
            (
                setups.NAMES[mixture],
                f"{100 * float(np.mean(errors)):.2f} %",
                f"{100 * max(errors):.2f} %",
                f"{right} of {pairs}",
            )
        )
    svg = scatter_figure(points, x=Axis("emulated, seconds"), y=Axis("estimated, seconds"), diagonal=True)
    figure = Figure("figure-11", "Iteration times of microbatches of 1, 2, 4 and 8 contexts", svg)
    table = make_table("pipetune/figure-11-sizes", rows)
    executed, picture = _executed(setting, slept)
    return Outcome((table, executed), (figure, picture), devices=(setting.device,))


def ranked_alike(ours: Sequence[float], theirs: Sequence[float]) -> tuple[int, int]:
    """How many pairs two lists of times rank alike, and of how many: those that differ in ``theirs``."""
    right = pairs = 0
    for a, b in itertools.combinations(range(len(ours)), 2):
        if abs(theirs[a] - theirs[b]) > 1e-3 * theirs[a]:
            pairs += 1
            right += (ours[a] < ours[b]) == (theirs[a] < theirs[b])
    return right, pairs


def _executed(setting: setups.EmulatedSetup, slept: list[_SizedRun]) -> tuple[Table, Figure]:
    """Run the plans on processes that sleep instead of computing."""
    found = run_on_ranks([emulation_of(setting, one) for one in slept], setups.RANKS, "sleep")
    rows, points = [], {}
    for mixture in setups.MIXTURES:
        mine = [(one, took) for one, took in zip(slept, found, strict=True) if one.mixture == mixture]
        right = pairs = 0
        for _, group in itertools.groupby(mine, key=lambda each: each[0].batch):
            both = list(group)
            good, of = ranked_alike([o.estimated_s for o, _ in both], [t.total_ns / 1e9 for _, t in both])
            right, pairs = right + good, pairs + of
        errors = [took.total_ns / 1e9 / one.estimated_s - 1 for one, took in mine]
        late = [
            replayed_ns(one.graph, one.run.plan.schedule, setting.layout.chunk_names, took.steps_ns)
            / simulate(one.graph, one.run.plan.schedule).makespan_ns
            - 1
            for one, took in mine
        ]
        rows.append(
            (
                setups.NAMES[mixture],
                str(len(mine)),
                f"{100 * float(np.mean(np.abs(errors))):.2f} %",
                f"{100 * max(errors, key=abs):+.2f} %",
                f"{100 * float(np.median(late)):+.2f} %",
                f"{right} of {pairs}",
            )
        )
        points[setups.NAMES[mixture]] = ([t.total_ns / 1e9 for _, t in mine], [o.estimated_s for o, _ in mine])
    svg = scatter_figure(points, x=Axis("on sleeping ranks, seconds"), y=Axis("estimated, seconds"), diagonal=True)
    picture = Figure("figure-11-executed", "The same plans on ranks that sleep", svg)
    return make_table("pipetune/figure-11-executed", rows, ranks=setups.RANKS, mean_ms=_MEAN_MS), picture


def emulation_of(setting: setups.EmulatedSetup, one: _SizedRun) -> Emulation:
    """Lower a tuned batch, and say how long each step is to be slept."""
    graph, plan = one.graph, one.run.plan
    lowered = lower(
        graph,
        plan.schedule,
        simulate(graph, plan.schedule),
        setting.layout,
        plan.packing,
        boundary_shapes(setting.costs.model_spec, setting.layout),
    )
    return Emulation(lowered, step_durations(graph, setting.layout.chunk_names))
