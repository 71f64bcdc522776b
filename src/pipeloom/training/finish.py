"""The end of a training run: baselines on its batches, drawings of one iteration, and the analysis of its time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pipeloom.compare.batches import chain_layouts, compare_systems
from pipeloom.compare.result import BaselineResult, track_of
from pipeloom.explain.difference import Difference, difference, mean_difference
from pipeloom.explain.difference_page import difference_page
from pipeloom.explain.replay import answered_graph, timeline_of
from pipeloom.io import write_text
from pipeloom.planner import PlanningProblem
from pipeloom.report import make_track, timeline_html, timeline_svg, trace
from pipeloom.report.table_page import TableSection
from pipeloom.runtime import StepReport
from pipeloom.timeline import LowerBound, Timeline
from pipeloom.training.record import Recorder, RunFacts, Summary, WaitingRanks
from pipeloom.training.waiting import RunWaiting, WaitedSystems

_NUM_COMPARED = 40


_LEAST_GAIN = 0.0005
"""Smaller gains would not show in the table."""


def finish(
    recorder: Recorder,
    problem: PlanningProblem,
    run: RunFacts,
    elapsed_s: float,
    kind: str = "separate",
    run_waiting: RunWaiting | None = None,
) -> Summary:
    """Compare with the baselines, draw one iteration, and write all files except the evaluation.

    ``elapsed_s`` is the wall time of this start. ``kind`` is ``layout.kind`` of the run. ``run_waiting`` runs the
    compared systems on waiting ranks; it is always called, since the other ranks take part.
    """
    reports = recorder.reports
    systems: dict[str, list[BaselineResult]] = {}
    explained = None
    # There are no reports if all iterations precede the checkpoint: then only the numbers are written again.
    corrected = problem.corrected(reports[-1].correction) if reports else problem
    if reports:
        systems = compared_systems(corrected, reports)
    waited = None if run_waiting is None else run_waiting(systems, corrected)
    if reports:
        write_timelines(recorder, problem, reports)
        write_comparison(recorder.folder, systems, waited)
        explained = mean_time_difference(problem, reports)
        write_text(recorder.folder / "difference.html", difference_page(run.name, explained))
    comparison = {name: [system.timeline.makespan_ns / 1e9 for system in results] for name, results in systems.items()}
    means = {name: statistics.fmean(seconds) for name, seconds in comparison.items()}
    waiting = None if waited is None else waited.means
    return recorder.summarize(run, elapsed_s, comparison, explained, advice(means, kind), waiting)


_PLAN = "per-batch plan"
_REMEDIES = {
    "chosen": "the layout is already chosen: give the planner more time (planner.budget_s) or threads, or set "
    'layout.kind = "arranged"',
    "arranged": 'give the planner more time (planner.budget_s) or threads, or set layout.kind = "chosen"',
}


def advice(comparison: Mapping[str, float], kind: str) -> str:
    """Return what to do if a baseline is planned to be faster than the per-batch plans; empty otherwise.

    ``comparison`` has mean planned seconds of each system on the same batches. ``kind`` is ``layout.kind`` of the run.
    """
    own = comparison.get(_PLAN)
    others = {name: seconds for name, seconds in comparison.items() if name != _PLAN}
    if own is None or not others:
        return ""
    best = min(others, key=others.__getitem__)
    gain = own / others[best] - 1
    if gain < _LEAST_GAIN:
        return ""
    names = {"1f1b": "1F1B", "interleaved": "interleaved 1F1B"}
    remedy = _REMEDIES.get(kind, 'set layout.kind = "chosen", or train with --choose-layout')
    return f"{names.get(best, best)} on its own layout is planned to be {gain:.1%} faster on these batches; {remedy}"


def compared_systems(problem: PlanningProblem, reports: list[StepReport]) -> dict[str, list[BaselineResult]]:
    """Plan some of the batches under each system."""
    batches = [report.batch for report in reports if report.batch is not None]
    batches = batches[:: max(1, -(-len(batches) // _NUM_COMPARED))]
    layouts = chain_layouts(problem, problem.profile_costs.profile.load, batches)
    systems: dict[str, list[BaselineResult]] = {}
    for batch in batches:
        for system in compare_systems(problem, layouts, batch):
            systems.setdefault(system.name, []).append(system)
    return systems


def mean_time_difference(problem: PlanningProblem, reports: list[StepReport]) -> Difference:
    """Return the mean difference of measured and planned time over the kept reports, without the first."""
    differences = [
        difference(problem, report.batch, report.answer, report.correction, report.measured)
        for report in reports[1:] or reports
        if report.batch is not None and report.answer is not None and report.measured is not None
    ]
    return mean_difference(differences)


def write_timelines(recorder: Recorder, problem: PlanningProblem, reports: list[StepReport]) -> None:
    """Write ``trace.json`` and ``timeline.html`` of the iteration nearest to the mean measured time."""
    settled = [report for report in reports[len(reports) // 2 :] if report.fresh] or reports
    mean = sum(report.measured_s for report in settled) / len(settled)
    report = min(settled, key=lambda each: abs(each.measured_s - mean))
    answer, batch = report.answer, report.batch
    assert answer is not None
    assert batch is not None
    graph = answered_graph(problem, batch, answer, report.correction)
    bound = LowerBound(answer.lower_bound_ns, answer.lower_bound)
    names = problem.layout.chunk_names
    planned = timeline_of(graph, problem, answer, answer.planned_start_ns)
    measured = timeline_of(graph, problem, answer, report.measured_ns)
    tracks = [
        make_track("planned", graph, None, planned, bound, names),
        make_track("measured", graph, None, measured, None, names),
    ]
    title = f"{recorder.folder.name}, iteration {report.iteration}"
    note = (
        f"All figures on this page are of iteration {report.iteration}, whose measured time is closest to the "
        "mean; difference.html has means over iterations. Memory is planned in both timelines; measured times are real "
        "computation on this machine's cores."
    )
    write_text(recorder.folder / "trace.json", trace(tracks))
    write_text(recorder.folder / "timeline.html", timeline_html(tracks, title=title, note=note))


def write_comparison(
    folder: Path, systems: Mapping[str, Sequence[BaselineResult]], waited: WaitedSystems | None = None
) -> None:
    """Write ``comparison.html`` and ``comparison.svg``: one batch under all systems, on one time axis.

    The batch has the median gain over the first system. If the systems ran on waiting ranks, their measured timelines
    are drawn.
    """
    if waited is None:
        tracks = [track_of(each) for each in _median_batch(list(systems.values()), lambda one: one.timeline)]
        title = f"{folder.name}: one batch under each system, planned"
        note = (
            "All figures on this page are of one batch. Simulated from measured layer costs, with the same samples, "
            "microbatches and costs for each system."
        )
        sections: tuple[TableSection, ...] = ()
    else:
        chosen = _median_batch(list(waited.systems.values()), lambda one: one.measured)
        tracks = [track_of(replace(one.result, timeline=one.measured)) for one in chosen]
        title = f"{folder.name}: one batch under each system, on ranks that wait instead of computing"
        note = (
            "The timelines are measured: every rank is a process that waits for the measured cost of each task and "
            "sends real messages of 8 bytes, so that ranks do not slow each other down on shared cores. "
            f"Waiting times are {waited.stretch:.3g} times the costs; the times here are divided by this factor."
        )
        sections = (_waiting_section(waited.means),)
    page = timeline_html(tracks, title=title, note=note, ranked=True, sections=sections)
    write_text(folder / "comparison.html", page)
    write_text(folder / "comparison.svg", timeline_svg(tracks))


_One = TypeVar("_One")


def _median_batch(systems: Sequence[Sequence[_One]], timeline: Callable[[_One], Timeline]) -> list[_One]:
    """Return the results of the batch with the median gain of the last system over the first."""
    gains = [timeline(a).makespan_ns / timeline(b).makespan_ns for a, b in zip(systems[0], systems[-1], strict=True)]
    median = sorted(range(len(gains)), key=gains.__getitem__)[len(gains) // 2]
    return [runs[median] for runs in systems]


def _waiting_section(means: WaitingRanks) -> TableSection:
    """Return the mean gains of the per-batch plans, planned and measured, as a table."""
    rows = []
    both = (means.mean_planned_s, means.mean_measured_s)
    for name in means.mean_planned_s:
        gains = ["" if name == _PLAN else f"{each[name] / each[_PLAN] - 1:+.1%}" for each in both]
        rows.append((name, *(f"{each[name] * 1e3:.1f} ms" for each in both), *gains))
    header = ("system", "planned", "measured on waiting ranks", "slower than the plan: planned", "measured")
    return TableSection(f"Means of {means.batches} batches", "", header, rows)
