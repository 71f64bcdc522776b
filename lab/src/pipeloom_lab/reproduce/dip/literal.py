"""DIP to the letter: its program for one rank's strategies by itself, and where reordering and strategies pay."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster, draw_iteration, graph_of
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.cost.emulated_mixtures import ParetoSteps
from pipeloom.cost.mixtures import Mixtures, ranges
from pipeloom.errors import InfeasibleError
from pipeloom.search import Budget, solve
from pipeloom.search.plain import minimum_memory
from pipeloom.search.strategies import StrategyChooser
from pipeloom.taskgraph import IntArray, TaskGraph
from pipeloom.timeline import Schedule, simulate, within_limits
from pipeloom_lab.figures import Axis, line_figure
from pipeloom_lab.reproduce.dip import runs
from pipeloom_lab.reproduce.dip.setups import SETUPS, bounded_microbatches, device
from pipeloom_lab.reproduce.part import Figure, Line, Options, Outcome
from pipeloom_lab.reproduce.texts import make_table
from pipeloom_lab.solvers import uniform_start
from pipeloom_lab.solvers.integer_program import HIGHS_GAP, program_strategies, solve_program, state_program
from pipeloom_lab.solvers.literal import standstills

MOST_CANDIDATES = 10
"""The paper's S."""


class KnapsackCosts(EmulatedCosts):
    """Costs that offer the fastest mixture, the minimum-memory one, and the fastest in each of eight ranges of bytes.

    All mixtures of the layers' strategies count, those that offload too. Keeping everything comes first, as everywhere;
    where another is as fast and holds less, it is offered beside it.
    """

    def _offered(self, found: Mixtures) -> list[int]:
        keep = int(found.front_without_offload[-1])
        rows = [keep, *(row for row in ranges(found, found.front, MOST_CANDIDATES) if row != keep)]
        return rows + rows[-1:] * (MOST_CANDIDATES + 1 - len(rows))


def knapsack_costs(setting: ModelOnCluster) -> KnapsackCosts:
    """Costs of a model on a cluster with DIP's own candidates."""
    return KnapsackCosts(
        setting.architecture, setting.cluster, setting.degrees, split=False, pareto_steps=ParetoSteps()
    )


COUNTS = (1, 2, 4, 8, 16, 64)
"""Microbatches whose programs are timed."""
EXACT_S = 2.0
"""Seconds of the clock after which a program that is to be solved to the end is cut."""
SEARCH = 2
"""Times the search time of one batch that each search has, on every core."""
SHOWN = 0.01
"""A step of less than so much of the time does not show."""
ORDERS = 50
"""Random orders that are looked at for standstills."""


def programs(options: Options) -> Outcome:
    """Time the integer program for one rank's strategies: cold and warm, to the end and to 5 %."""
    ways = {"to the end, cold": (0.0, False), "to 5 %, cold": (HIGHS_GAP, False), "to 5 %, warm": (HIGHS_GAP, True)}
    rows, lines = [], {name: Line([], []) for name in (*ways, "ours")}
    for label in ("VLM-S", "T2V-S"):
        setting = SETUPS[label].setting
        layout, costs = runs.system(SETUPS[label], runs.PUBLISHED).layout, knapsack_costs(setting)
        for count in COUNTS:
            graph = graph_of(setting, layout, draw_iteration(setting, count, 500 + options.seeds[0]), label, costs)
            found = _timed_programs(graph, ways)
            sizes = [program.pairs for program in found]
            rows.append(
                (
                    label,
                    str(count),
                    f"{statistics.mean(sizes):.0f}",
                    f"{_median(p.stated_s for p in found):.1f}",
                    *(f"{_median(p.took_s[name] for p in found):.1f}" for name in lines),
                    f"{sum(p.proved for p in found)} of {len(found)}",
                    *(f"{100 * max(p.above[name] for p in found):.2f} %" for name in ("to 5 %, warm", "ours")),
                )
            )
            for name, line in lines.items() if label == "VLM-S" else ():
                line.add(count, _median(p.took_s[name] for p in found))
    svg = line_figure(
        {name: line for name, line in lines.items() if line.x},
        x=Axis("microbatches", log=True),
        y=Axis("ms of one program", log=True),
        title="VLM-S",
    )
    return Outcome(
        (make_table("dip/program", rows, exact_s=EXACT_S, ways=(f"{name}, ms" for name in ways)),),
        (Figure("program", "Time of one rank's program", svg),),
        devices=device(*(SETUPS[label] for label in ("VLM-S", "T2V-S"))),
    )


def _median(values: Iterable[float]) -> float:
    return 1e3 * statistics.median(values)


@dataclass(frozen=True, slots=True)
class _Program:
    """One rank's program: its size, seconds by the way it was solved, and how far answers are above its best bound."""

    pairs: int
    stated_s: float
    took_s: dict[str, float]
    above: dict[str, float]
    proved: bool


def _timed_programs(graph: TaskGraph, ways: dict[str, tuple[float, bool]]) -> list[_Program]:
    chooser, schedule = StrategyChooser(graph), _first_order(graph)
    found = []
    for rank, order in enumerate(schedule.order):
        if not len(order):
            continue
        begun = time.process_time()
        stated = state_program(chooser, order, rank)
        stated_s, took_s, totals, bound = time.process_time() - begun, dict[str, float](), dict[str, int](), 0.0
        for name, (gap, warm) in ways.items():
            begun = time.process_time()
            answer = solve_program(stated, gap=gap, warm=warm, seconds=EXACT_S)
            took_s[name], totals[name] = time.process_time() - begun, answer.total_ns
            bound = max(bound, answer.bound_ns if np.isfinite(answer.bound_ns) else 0.0)
        begun = time.process_time()
        mine = chooser.on_rank(order, rank)
        took_s["ours"], totals["ours"] = time.process_time() - begun, mine.total_ns
        bound = max(bound, mine.bound_ns)
        above = {name: max(0.0, total / bound - 1) if bound else 0.0 for name, total in totals.items()}
        found.append(_Program(len(stated.pairs), stated_s, took_s, above, above["to the end, cold"] < 1e-4))
    return found


def _first_order(graph: TaskGraph) -> Schedule:
    """Return first in, first out with minimum-memory candidates, which fits."""
    lean = graph.with_candidates(minimum_memory(graph))
    return solve(lean, budget=Budget(evaluations=1), seed=0, method="mcts").schedule


@dataclass(frozen=True, slots=True)
class Workload:
    """Where the effects of Table 5 and Fig. 11 are looked for."""

    model: str
    microbatches: int
    images: tuple[int, int] | None = None
    """Least and most of a microbatch; None: the evaluation's own data."""
    memory: float = 1.0
    """Share of what the weights leave of a device's memory."""

    @property
    def words(self) -> tuple[str, str, str, str]:
        """Its cells of a table."""
        data = "its own data" if self.images is None else f"{self.images[0]} to {self.images[1]} images"
        return self.model, str(self.microbatches), data, f"{100 * self.memory:.0f} %"

    def graphs(self, seed: int) -> tuple[TaskGraph, TaskGraph]:
        """Graphs with DIP's candidates and with uniform settings, under its memory."""
        setup = SETUPS[self.model]
        setting, layout = setup.setting, runs.system(setup, runs.PUBLISHED).layout
        groups: Microbatches
        if self.images is None:
            groups = draw_iteration(setting, self.microbatches, 500 + seed)
        else:
            groups = bounded_microbatches(self.microbatches, *self.images, 500 + seed)
        name = " ".join(self.words)
        free, levels = (
            graph_of(setting, layout, groups, name, costs) for costs in (knapsack_costs(setting), setting.levels)
        )
        return self._tight(free), self._tight(levels)

    def _tight(self, graph: TaskGraph) -> TaskGraph:
        if graph.capacity_bytes is None or self.memory == 1.0:
            return graph
        left = ((graph.capacity_bytes - graph.static_bytes) * self.memory).astype(np.int64)
        return replace(graph, capacity_bytes=graph.static_bytes + left)


EFFECTS = ("reordering", "strategies", "strategies for that order", "both", "lead of the tree search")
WORKLOADS = (
    Workload("VLM-S", 64),
    Workload("VLM-S", 16),
    Workload("VLM-S", 8),
    Workload("VLM-S", 4),
    Workload("VLM-S", 8, (0, 4)),
    Workload("VLM-S", 8, (0, 44)),
    Workload("VLM-S", 8, memory=0.75),
    Workload("VLM-S", 8, (0, 44), memory=0.75),
    Workload("T2V-S", 8),
    Workload("VLM-L", 16),
)
_PAPER = ("paper, VLM-S", "not stated", "not stated", "100 %", "6.8 %", "9.7 %", "", "16.9 %", "above 0 %", *[""] * 3)
"""Ratios of Table 5's seconds: 18.81 / 17.61, 17.61 / 16.05, 18.81 / 16.05. For display only."""


def to_the_letter(options: Options) -> Outcome:
    """Look for the steps of Table 5 and the lead of Fig. 11 on ever other workloads."""
    rows = [_PAPER, *((*workload.words, *_effects(workload, options)) for workload in WORKLOADS)]
    cores = len(os.sched_getaffinity(0))
    shown = [row for row in rows[1:] if any(_shows(cell) for cell in row[4:9])]
    summary = tuple(
        (name, str(sum(_shows(row[place]) for row in rows[1:])), str(len(rows) - 1))
        for name, place in zip(EFFECTS, range(4, 9), strict=True)
    )
    found = f"{len(shown)} of {len(WORKLOADS)} workloads show an effect; the others are not reproduced."
    return Outcome(
        (
            make_table(
                "dip/literal-workloads",
                rows,
                gap=100 * HIGHS_GAP,
                seconds=SEARCH * options.search_s,
                cores=cores,
                plural="s" * (cores > 1),
                shown=100 * SHOWN,
                orders=ORDERS,
            ),
            make_table("dip/literal-effects", summary, found=found),
        ),
        devices=device(*(SETUPS[name] for name in dict.fromkeys(w.model for w in WORKLOADS))),
    )


def _shows(cell: str) -> bool:
    return cell.endswith("%") and float(cell.removesuffix("%")) >= 100 * SHOWN


def _effects(workload: Workload, options: Options) -> tuple[str, ...]:
    """Cells of one workload after its words."""
    seed, threads = options.seeds[0], len(os.sched_getaffinity(0))
    limit = Budget(seconds=SEARCH * options.search_s * threads, clock="cpu")
    try:
        graph, levels = workload.graphs(seed)
        start = uniform_start(levels)
        if start is None:
            raise InfeasibleError("no uniform setting fits")
        choice: IntArray | None = start.candidate
        first = simulate(levels, start).makespan_ns
        uniform = levels.with_candidates(choice) if choice is not None else levels
        tree, *others = (
            solve(uniform, budget=limit, seed=seed, method=method, threads=threads)
            for method in ("mcts", "depth first", "random")
        )
        whole = solve(graph, budget=limit, seed=seed, method="dip literal", threads=threads).timeline.makespan_ns
        ours = solve(graph, budget=Budget(seconds=options.search_s, clock="cpu"), seed=seed).timeline.makespan_ns
        kept = _with_programs(graph, tree.schedule)
        stuck = standstills(graph, ORDERS, seed)
    except InfeasibleError as error:
        return ("does not fit", *("",) * 6, str(error).partition(";")[0][:60])
    found = tree.timeline.makespan_ns
    best = min(found, whole, kept or found)
    lead = min(other.timeline.makespan_ns for other in others) / found
    gains = (first / found, found / whole, found / kept if kept else None, first / best, lead, best / ours)
    cells = ["does not fit" if gain is None else f"{100 * (gain - 1):.1f} %" for gain in gains]
    seen = [name for name, cell in zip(EFFECTS, cells, strict=False) if name != "both" and _shows(cell)]
    return (*cells, f"{stuck} of {ORDERS}", ", ".join(seen) if seen else "not reproduced")


def _with_programs(graph: TaskGraph, schedule: Schedule) -> int | None:
    """Return the makespan of an order with strategies by the programs, or None if it does not fit at all."""
    lean = Schedule(schedule.order, minimum_memory(graph), "")
    if not within_limits(graph, lean, simulate(graph, lean)):
        return None
    found = program_strategies(graph, schedule)
    timeline = simulate(graph, found)
    return timeline.makespan_ns if within_limits(graph, found, timeline) else None
