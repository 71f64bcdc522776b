"""Reconstruction of the graph and timeline of a received plan, to compare planned and measured times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeloom.cost import Correction
from pipeloom.packing import packing_from_counts
from pipeloom.plan import Answer, ExecutionPlan
from pipeloom.planner.problem import PlanningProblem
from pipeloom.spec import Batch, strategy_word
from pipeloom.taskgraph import KIND_NAMES, Assignable, IntArray, TaskGraph, build_assignable
from pipeloom.timeline import Timeline, memory_curve, resolve_candidates


def answered_graph(problem: PlanningProblem, batch: Batch, answer: Answer, correction: Correction) -> TaskGraph:
    """Rebuild the graph on which an answer was planned, with the strategies of its plan."""
    packing = packing_from_counts(batch, problem.model, problem.layout, answer.packing.samples, answer.packing.counts)
    costs = problem.corrected(correction).costs
    name = f"iteration {batch.iteration}"
    assignable = build_assignable(
        problem.layout,
        packing,
        costs,
        name=name,
        capacity_bytes=problem.memory.capacity_bytes,
        backward="either" if problem.split_backward else "whole",
    )
    graph = assignable.assigned(_assignment(assignable, problem, answer.plan)).graph
    return resolve_candidates(graph, _chosen(graph, problem, answer.plan)).graph


def _assignment(assignable: Assignable, problem: PlanningProblem, plan: ExecutionPlan) -> IntArray:
    """Return the rank of every pair under a plan, which assigns the parts of replicated modules."""
    assignment = assignable.assignment.copy()
    if not assignable.free.any():
        return assignment
    names, chunks = problem.layout.chunk_names, problem.layout.chunks
    module_of = {name: chunk.module for name, chunk in zip(names, chunks, strict=True)}
    rank_of = {
        (module_of[action.chunk], action.microbatch, action.sub_microbatch): rank
        for rank, actions in enumerate(plan.ranks)
        for action in actions
        if action.verb == "F"
    }
    for pair in np.flatnonzero(assignable.free).tolist():
        label = (assignable.graph.labels or ())[pair]
        assignment[pair] = rank_of[chunks[label.chunk].module, label.microbatch, label.sub_microbatch]
    return assignment


def _chosen(graph: TaskGraph, problem: PlanningProblem, plan: ExecutionPlan) -> IntArray | None:
    """Return the candidate of every pair with the strategy and the form of backward of the plan."""
    if graph.candidates is None:
        return None
    strategy: dict[tuple[str, int, int], str] = {}
    split_units: set[tuple[str, int, int]] = set()
    for action in (action for actions in plan.ranks for action in actions):
        unit = (action.chunk, action.microbatch, action.sub_microbatch)
        if action.verb == "F":
            strategy[unit] = action.strategy
        elif action.verb == "W":
            split_units.add(unit)
    names, found = problem.layout.chunk_names, []
    for label, options in zip(graph.labels or (), graph.candidates, strict=True):
        unit = (names[label.chunk], label.microbatch, label.sub_microbatch)
        of_strategy = [i for i, o in enumerate(options) if strategy_word(o.strategy, o.layers) == strategy[unit]]
        whole = [i for i in of_strategy if options[i].weight_ns == 0]
        split = [i for i in of_strategy if options[i].weight_ns > 0]
        found.append(((split or whole) if unit in split_units else (whole or split))[0])
    return np.array(found, np.int64)


def task_numbers(graph: TaskGraph, problem: PlanningProblem) -> dict[tuple[str, str, int, int], int]:
    """Return the task of every compute action, by verb, chunk, microbatch and sub-microbatch."""
    names = problem.layout.chunk_names
    number = {}
    for task in range(graph.num_tasks):
        label = (graph.labels or ())[int(graph.pair[task])]
        key = (KIND_NAMES[graph.kind[task]], names[label.chunk], label.microbatch, label.sub_microbatch)
        number[key] = task
    return number


def timeline_of(
    graph: TaskGraph, problem: PlanningProblem, answer: Answer, times_ns: Sequence[tuple[int, int]]
) -> Timeline:
    """Make the timeline of a graph of `answered_graph` from the times of an answer's compute actions.

    ``times_ns`` are planned (``answer.planned_start_ns``) or measured times, rank by rank, in each rank's order. Peaks
    are those of the planned bytes at these times.
    """
    number = task_numbers(graph, problem)
    actions = [a for rank in answer.plan.ranks for a in rank if a.verb.is_compute]
    start, end = np.zeros(graph.num_tasks, np.int64), np.zeros(graph.num_tasks, np.int64)
    for action, (begin, finish) in zip(actions, times_ns, strict=True):
        task = number[action.verb, action.chunk, action.microbatch, action.sub_microbatch]
        start[task], end[task] = begin, finish
    without_peaks = Timeline(start, end)
    peaks = [int(memory_curve(graph, without_peaks, rank)[1].max()) for rank in range(graph.num_ranks)]
    return Timeline(start, end, np.array(peaks, np.int64))
