"""Images a microbatch as an axis, from 1 to 44, since the paper states no number: Table 1, Fig. 8a and Fig. 9."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeloom.compare.baseline import System, mfu
from pipeloom.compare.baselines.megatron import megatron_1f1b
from pipeloom.compare.chosen_layout import choose_layout
from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster, model_flops
from pipeloom.compare.registry import BASELINES
from pipeloom.errors import InfeasibleError
from pipeloom.search import Budget, solve
from pipeloom.spec.datasets import CONTEXT_TOKENS
from pipeloom_lab.figures import Axis, line_figure
from pipeloom_lab.reproduce.dip import runs
from pipeloom_lab.reproduce.dip.ablation import graph_of_size
from pipeloom_lab.reproduce.dip.characterize import LM_MICROBATCHES, models_of_table_1, up_to
from pipeloom_lab.reproduce.dip.setups import SETUPS, bounded_microbatches, device, gain, mean
from pipeloom_lab.reproduce.part import Figure, Line, Options, Outcome, Table
from pipeloom_lab.reproduce.texts import make_table

AXIS = (1, 2, 4, 8, 12, 16, 22, 32, 44)
"""Images a microbatch on average. 48 fill the context of 8192 tokens."""
MOST_IMAGES = 48
THROUGHPUT_AXIS = (2, 4, 8, 16, 44)
ORDER_AXIS = (2, 4, 8, 12, 44)
"""Where searches are needed, fewer numbers."""
SIZES = (4, 12, 24)
"""Images a sub-microbatch: the paper's small ones, its best, and a large one."""
ALIKE = 1.001
"""Of the least time, up to which sizes are best alike."""
ITERATIONS = 2
"""Timed for every number of images."""
TRIAL_S = 0.5
"""Of search for every layout that is tried on one more iteration."""


def spread_around(images: int) -> tuple[int, int]:
    """Least and most images of microbatches that differ as much as they can around a mean."""
    wide = min(images, MOST_IMAGES - images)
    return images - wide, images + wide


def over_images(options: Options) -> Outcome:
    """Table 1, Fig. 8a and Fig. 9 over the images of a microbatch."""
    overhead, lost = _overheads(options)
    gains, faster = _throughput(options)
    orders = _orders(options)
    return Outcome(
        (overhead, gains, orders),
        (
            Figure(
                "images-overhead",
                "Table 1's overheads over the images of a microbatch",
                line_figure(lost, x=Axis("images a microbatch"), y=Axis("share of the time lost, %")),
            ),
            Figure(
                "images-throughput",
                "Fig. 8a's gains over the images of a microbatch",
                line_figure(faster, x=Axis("images a microbatch"), y=Axis("ours is faster by, %")),
            ),
        ),
        devices=device(SETUPS["VLM-S"]),
    )


_Lines = dict[str, Line]


def _overheads(options: Options) -> tuple[Table, _Lines]:
    """Table 1: what a language model's time for as many operations is exceeded by."""
    language, texts, both = models_of_table_1()
    target = model_flops(language, texts)
    base = _seconds_and_mfu(language, texts)[1]
    lines = {name: Line([], []) for name in ("static data", "dynamic data")}
    rows = []
    for count in AXIS:
        cells = [str(count)]
        for name, bounds in (("static data", (count, count)), ("dynamic data", spread_around(count))):
            found = [
                _seconds_and_mfu(both, up_to(both, bounded_microbatches(3 * LM_MICROBATCHES, *bounds, seed), target))
                for seed in options.seeds
            ]
            seconds, share = (mean(each) for each in zip(*found, strict=True))
            lines[name].add(count, 100 * (1 - share / base))
            cells += [f"{bounds[0]} to {bounds[1]}"] if name == "dynamic data" else []
            cells += [f"{seconds:.3f}", f"{share:.3f}", f"{lines[name].y[-1]:.1f} %"]
        rows.append(tuple(cells))
    near = (
        ("the paper's", "4.567", "0.351", "12.5 %", "not stated", "6.789", "0.239", "40.3 %"),
        ("where ours is nearest", *_nearest(rows, (1, 2, 3), 12.5), "", *_nearest(rows, (5, 6, 7), 40.3)),
    )
    return make_table("dip/images-overheads", (*rows, *near), lm_microbatches=LM_MICROBATCHES, base=base), lines


def _seconds_and_mfu(setting: ModelOnCluster, groups: Microbatches) -> tuple[float, float]:
    found = runs.run(megatron_1f1b(setting, [groups]), groups, Budget(evaluations=1), 0)
    if found is None:
        raise InfeasibleError("1F1B by parameters: an iteration of the axis does not fit")
    return found.iteration_s, mfu(setting, groups, setting.iteration_s(found))


def _nearest(rows: Sequence[tuple[str, ...]], places: tuple[int, int, int], paper: float) -> tuple[str, str, str]:
    """Cells of the row whose overhead is nearest to the paper's, the last with its number of images."""
    row = min(rows, key=lambda each: abs(float(each[places[2]].removesuffix(" %")) - paper))
    return row[places[0]], row[places[1]], f"{row[places[2]]} ({row[0]} images)"


@dataclass(frozen=True, slots=True)
class _Iterations:
    """Iterations of VLM-S with so many images: one that layouts are chosen on, and those that are timed."""

    typical: Microbatches
    timed: tuple[Microbatches, ...]


def _iterations(count: int, seed: int) -> _Iterations:
    setup, bounds = SETUPS["VLM-S"], spread_around(count)
    drawn = [
        bounded_microbatches(setup.num_microbatches, *bounds, 1000 * (1 + seed) + i) for i in range(1 + ITERATIONS)
    ]
    return _Iterations(drawn[0], tuple(drawn[1:]))


def _throughput(options: Options) -> tuple[Table, _Lines]:
    """Fig. 8a: ours and all baselines on VLM-S."""
    setting, names = SETUPS["VLM-S"].setting, {name: BASELINES[name].title for name in runs.BASELINE_NAMES}
    lines = {title: Line([], []) for title in names.values()}
    rows = []
    for count in THROUGHPUT_AXIS:
        each = _iterations(count, options.seeds[0])
        systems = {
            title: runs.any_size(BASELINES[name].make(setting, [each.typical]), setting.iteration_s)
            for name, title in names.items()
        }
        chosen = choose_layout(
            setting, [each.typical], trial=Budget(seconds=TRIAL_S * options.search_s, clock="cpu"), rounds=1
        )[0]
        ours = runs.own_system("ours", setting, [chosen.layout], [each.typical], CONTEXT_TOKENS, runs.CHOICE)
        mine = _mean_s(setting, ours, each, runs.planning_s(runs.OURS, options.search_s))
        cells = [str(count), " to ".join(map(str, spread_around(count))), "" if mine is None else f"{mine:.2f}"]
        gains = list[float]()
        for title, system in systems.items():
            theirs = _mean_s(setting, system, each, options.search_s)
            if theirs is None or mine is None:
                cells.append("out of memory")
                continue
            gains.append(theirs / mine - 1)
            lines[title].add(count, 100 * gains[-1])
            cells.append(gain(theirs, mine))
        rows.append((*cells, f"{100 * min(gains):+.1f} %" if gains else "", chosen.name))
    return make_table(
        "dip/images-throughput",
        rows,
        num_microbatches=SETUPS["VLM-S"].num_microbatches,
        iterations=ITERATIONS,
        appears=_appears(rows, 3 + list(names.values()).index(runs.MEGATRON)),
        titles=(f"over {title}" for title in names.values()),
    ), lines


def _appears(rows: Sequence[tuple[str, ...]], place: int) -> str:
    """Where a gain of the paper's Table 5 appears in a column, in words."""
    reached = [row[0] for row in rows if row[place].endswith("%") and float(row[place].removesuffix(" %")) >= 62.8]
    if not reached:
        return "On no number of images is ours ahead of Megatron-LM by parameters by that much."
    return f"Ours is ahead of Megatron-LM by parameters by as much with {', '.join(reached)} images."


def _nearest_gaps(rows: Sequence[tuple[str, ...]]) -> str:
    """Where the gaps of the paper's Fig. 9, and its best size, appear in rows of gaps, seconds and best sizes."""
    near, (_, papers, large) = [], SIZES
    for size, gap in ((large, 15.4), (papers, 5.1)):
        place = 1 + SIZES.index(size)
        row = min(rows, key=lambda row: abs(float(row[place].removesuffix(" %")) - gap))
        near.append(f"{size} images are nearest to {gap} % with {row[0]} images a microbatch ({row[place]})")
    best = [row[0] for row in rows if str(papers) in row[-1].split(", ")]
    return f"Here {'; '.join(near)}; {papers} are best with {', '.join(best) or 'none of these'}."


def _mean_s(setting: ModelOnCluster, one: System, each: _Iterations, search_s: float) -> float | None:
    found = []
    for number, groups in enumerate(each.timed):
        result = runs.run(one, groups, Budget(seconds=search_s, clock="cpu"), number)
        if result is None:
            return None
        found.append(setting.iteration_s(result))
    return mean(found)


def _orders(options: Options) -> Table:
    """Fig. 9: best and worst order by the size of sub-microbatches."""
    rows = []
    for count in ORDER_AXIS:
        groups = _iterations(count, options.seeds[0]).timed[0]
        low, gaps = dict[int, float](), list[str]()
        for size in SIZES:
            graph = graph_of_size(SETUPS["VLM-S"], groups, size)
            best, worst = (
                solve(
                    graph, budget=Budget(seconds=options.search_s, clock="cpu"), seed=0, method=method
                ).timeline.makespan_ns
                for method in ("default", "worst")
            )
            low[size] = best / 1e9
            gaps.append(f"{100 * (worst / best - 1):.1f} %")
        least = min(low.values())
        alike = ", ".join(str(size) for size in SIZES if low[size] < ALIKE * least)
        rows.append((str(count), *gaps, *(f"{low[size]:.2f}" for size in SIZES), alike))
    return make_table(
        "dip/images-orders",
        rows,
        nearest_gaps=_nearest_gaps(rows),
        gaps=(f"gap, {size} images" for size in SIZES),
        bests=(f"best, {size} images, s" for size in SIZES),
    )
