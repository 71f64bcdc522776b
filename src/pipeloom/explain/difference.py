"""Causes of the difference between planned and measured time, found by replaying the plan with each cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from statistics import fmean, median
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from pipeloom.bounds import Finite, NumBytes
from pipeloom.cost import Correction, StrategyCost, between_s
from pipeloom.explain.replay import answered_graph, task_numbers
from pipeloom.packing import packing_from_counts
from pipeloom.plan import Answer, Measured, MessageTime, fit_links
from pipeloom.planner.problem import PlanningProblem
from pipeloom.spec import Batch, Chunk, Workload
from pipeloom.taskgraph import FORWARD, IntArray, TaskGraph
from pipeloom.timeline import Schedule, Timeline, bubbles, simulate


class KindTime(msgspec.Struct, frozen=True):
    """Seconds of all layers of one kind in one iteration, over all ranks."""

    kind: str
    """``module/kind``."""
    forward_planned_s: Finite
    forward_measured_s: Finite
    backward_planned_s: Finite
    backward_measured_s: Finite


class IdleTime(msgspec.Struct, frozen=True):
    """Idle seconds of an iteration for one cause, mean over ranks; see `pipeloom.timeline.Bubbles`."""

    cause: str
    planned_s: Finite
    measured_s: Finite


class Difference(msgspec.Struct, frozen=True):
    """Difference between planned and measured time by cause, as means over iterations.

    The causes add up: ``planned_s + shared_cores_s + computation_s + messages_s + rest_s == measured_s``. Each is the
    increase of the iteration time when the plan is also replayed with this cause, in this order. So
    ``planned_s + shared_cores_s`` is the time of a plan that accounts for shared cores.
    """

    iterations: NumBytes
    planned_s: Finite
    measured_s: Finite
    shared_cores_s: Finite
    """Slower computation since ranks share cores, beyond the part that the plan's corrections already include."""
    computation_s: Finite
    """Computation that took more CPU time than predicted."""
    messages_s: Finite
    """Messages that took longer than predicted."""
    rest_s: Finite
    """Posting of messages, dispatch, and other effects that a replay does not model."""
    wait_planned_s: Finite
    """Planned idle time of a rank."""
    wait_measured_s: Finite
    """Measured time of a rank in waits for messages."""
    posting_s: Finite
    """Time of a rank in actions that neither compute nor wait."""
    message_planned_s: Finite
    """Median planned time of messages."""
    message_measured_s: Finite
    """Median measured time of messages whose receivers waited for them."""
    num_messages: NumBytes
    kinds: tuple[KindTime, ...]
    core_share: Finite = 1.0
    """Share of a core that a rank had while computing, mean over ranks; 1 on a separate device."""
    idle: tuple[IdleTime, ...] = ()
    """Planned and measured idle time by cause."""


_Row = TypeVar("_Row", KindTime, IdleTime)


def difference(
    problem: PlanningProblem, batch: Batch, answer: Answer, correction: Correction, measured: Measured
) -> Difference:
    """Explain one iteration.

    Parameters
    ----------
    answer : Answer
        Answer with the executed plan.
    correction : Correction
        Correction with which it was planned.
    """
    graph = answered_graph(problem, batch, answer, correction)
    number = task_numbers(graph, problem)
    per_rank = [[a for a in actions if a.verb.is_compute] for actions in answer.plan.ranks]
    order = tuple(
        np.array([number[a.verb, a.chunk, a.microbatch, a.sub_microbatch] for a in actions], np.int64)
        for actions in per_rank
    )
    planned, found = np.zeros(graph.num_tasks, np.int64), np.zeros(graph.num_tasks, np.int64)
    tasks = np.concatenate(order)
    planned_ns, found_ns = answer.planned_start_ns, measured.compute_ns(answer.plan)
    planned[tasks] = [end - start for start, end in planned_ns]
    found[tasks] = [end - start for start, end in found_ns]
    waits, posts, shares = _outside_computation(answer, measured)

    messages = measured.messages(answer.plan)
    waited_for = [message for message in messages if message.was_waited_for]
    with_links = answered_graph(problem, batch, answer, correction.towards(fit_links(messages, correction.hosts)))
    # A layer that waits uses little CPU time too, so shared cores explain no more than the measured time.
    on_shared_cores = np.minimum(
        (planned * _slowdown(graph, correction, shares)).astype(np.int64), np.maximum(planned, found)
    )
    ends = [
        _replayed(where, durations, order)
        for where, durations in ((graph, planned), (graph, on_shared_cores), (graph, found), (with_links, found))
    ]
    makespan = measured.makespan_ns(answer.plan)
    ends = [*(end + (answer.planned_ns - ends[0]) for end in ends), makespan]
    causes = [(after - before) / 1e9 for before, after in pairwise(ends)]
    busy = int(planned.sum()) / graph.num_ranks
    return Difference(
        iterations=1,
        planned_s=answer.planned_ns / 1e9,
        measured_s=makespan / 1e9,
        shared_cores_s=causes[0],
        computation_s=causes[1],
        messages_s=causes[2],
        rest_s=causes[3],
        wait_planned_s=(answer.planned_ns - busy) / 1e9,
        wait_measured_s=fmean(waits),
        posting_s=fmean(posts),
        message_planned_s=_planned_message(problem.corrected(correction), messages),
        message_measured_s=median([m.under_way_ns / 1e9 for m in waited_for] or [0.0]),
        num_messages=len(messages),
        core_share=fmean(shares),
        kinds=_by_kind(problem, batch, answer, correction, graph, planned, found),
        idle=_idle_times(graph, tasks, planned_ns, found_ns),
    )


def mean_difference(found: Sequence[Difference]) -> Difference:
    """Return the mean over at least one iteration."""
    means = {
        name: fmean(getattr(each, name) for each in found)
        for name in Difference.__struct_fields__
        if name.endswith("_s")
    }
    return Difference(
        iterations=len(found),
        num_messages=round(fmean(each.num_messages for each in found)),
        kinds=_means(KindTime, [each.kinds for each in found]),
        core_share=fmean(each.core_share for each in found),
        idle=_means(IdleTime, [each.idle for each in found]),
        **means,
    )


def _means(kind: Callable[..., _Row], found: Sequence[Sequence[_Row]]) -> tuple[_Row, ...]:
    """Return the mean seconds of rows with the same first field over iterations; 0 in an iteration without the row."""
    seconds: defaultdict[str, list[list[float]]] = defaultdict(list)
    for rows in found:
        for row in rows:
            name, *values = msgspec.structs.astuple(row)
            seconds[name].append(values)
    return tuple(
        kind(name, *(sum(column) / len(found) for column in zip(*values, strict=True)))
        for name, values in seconds.items()
    )


def _idle_times(graph: TaskGraph, tasks: IntArray, *times_ns: Sequence[tuple[int, int]]) -> tuple[IdleTime, ...]:
    """Attribute the ranks' idle time to causes, under planned and under measured times of tasks."""
    columns = []
    for each in times_ns:
        start, end = np.zeros(graph.num_tasks, np.int64), np.zeros(graph.num_tasks, np.int64)
        start[tasks], end[tasks] = np.array(each, np.int64).reshape(-1, 2).T
        found = bubbles(graph, Timeline(start, end))
        columns.append(
            {
                "before the first task": found.warm_up_ns,
                "after the last task": found.cool_down_ns,
                "an input was being computed on another rank": found.waiting_ns.sum(axis=1),
                "its result was being transferred": found.transfer_ns,
                "another task was ready, but did not fit into memory": found.memory_ns,
                "another task was ready, but not next in the order, or the rank was delayed": found.order_ns,
            }
        )
    planned, measured = columns
    return tuple(
        IdleTime(cause, float(ns.mean()) / 1e9, float(measured[cause].mean()) / 1e9) for cause, ns in planned.items()
    )


def _outside_computation(answer: Answer, measured: Measured) -> tuple[list[float], list[float], list[float]]:
    """Return by rank the seconds in waits, the seconds in other actions, and the share of a core while busy."""
    waits, posts, shares = [], [], []
    for actions, times, cpu_ns in zip(answer.plan.ranks, measured.times_ns, measured.cpu_ns, strict=True):
        spent = (times[:, 1] - times[:, 0]).tolist()
        waited = sum(ns for action, ns in zip(actions, spent, strict=True) if action.verb.is_wait)
        computed = sum(ns for action, ns in zip(actions, spent, strict=True) if action.verb.is_unit)
        busy = sum(spent) - waited
        waits.append(waited / 1e9)
        posts.append((busy - computed) / 1e9)
        # A GPU is not shared, and the CPU time of its host thread is dispatch.
        shares.append(1.0 if cpu_ns < 0 else min(1.0, max(cpu_ns, 1) / max(busy, 1)))
    return waits, posts, shares


def _slowdown(graph: TaskGraph, correction: Correction, shares: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return the slowdown of each task on a share of a core, beyond the slowdown that corrections include.

    Corrections come from wall-clock times, so they include shared cores of previous iterations. They do not distinguish
    shared cores from a wrong profile; if cores are shared, all of the correction is attributed to them.
    """
    learned = np.array([correction.modules.get(name, (1.0, 1.0)) for name in graph.module_names])
    half = (graph.kind != FORWARD).astype(np.int64)
    slowness = np.array(correction.of_ranks(graph.num_ranks))
    known = np.maximum(1.0, learned[graph.module, half] * slowness[graph.rank])
    slowdown: npt.NDArray[np.float64] = 1 / np.array(shares)[graph.rank] / known
    return np.maximum(1.0, slowdown)


def _replayed(graph: TaskGraph, durations: IntArray, order: tuple[IntArray, ...]) -> int:
    """Simulate the plan's order with other durations; return the makespan."""
    timed = replace(graph, duration_ns=durations, candidates=None)
    return simulate(timed, Schedule(order)).makespan_ns


def _planned_message(problem: PlanningProblem, messages: Sequence[MessageTime]) -> float:
    costs = problem.costs
    return median([between_s(costs, m.num_bytes, m.sender, m.receiver) for m in messages] or [0.0])


def _by_kind(
    problem: PlanningProblem,
    batch: Batch,
    answer: Answer,
    correction: Correction,
    graph: TaskGraph,
    planned: IntArray,
    found: IntArray,
) -> tuple[KindTime, ...]:
    """Return seconds by kind of layer. The time of a chunk is divided by its layers' predicted shares."""
    packing = packing_from_counts(batch, problem.model, problem.layout, answer.packing.samples, answer.packing.counts)
    shares_of = cache(partial(_kind_shares, problem.corrected(correction)))
    sums: dict[str, list[float]] = {}
    for pair, label in enumerate(graph.labels or ()):
        chunk = problem.layout.chunks[label.chunk]
        workload = packing.parts_of(label.microbatch, chunk.module)[label.sub_microbatch].workload
        of_kind = shares_of(chunk, workload)
        backward = [graph.backward_of[pair], graph.weight_of[pair]]
        for half, tasks in enumerate(([graph.forward_of[pair]], backward)):
            for task in tasks:
                if task < 0:
                    continue
                for kind, share in of_kind.items():
                    row = sums.setdefault(kind, [0.0] * 4)
                    row[2 * half] += share[half] * int(planned[task]) / 1e9
                    row[2 * half + 1] += share[half] * int(found[task]) / 1e9
    return tuple(KindTime(kind, *row) for kind, row in sums.items())


def _kind_shares(problem: PlanningProblem, chunk: Chunk, workload: Workload) -> dict[str, tuple[float, float]]:
    """Return the shares of each kind of layer in the predicted forward and backward of a chunk."""
    layers = problem.model.module(chunk.module).flat_layers
    costs: list[tuple[str, StrategyCost]] = []
    for i in chunk.layer_numbers:
        alone = Chunk(chunk.module, (i, i), chunk.rank)
        costs.append((f"{chunk.module}/{layers[i].kind}", problem.costs.chunk_costs(alone, workload)[0]))
    totals = [sum(_halves(cost)[half] for _, cost in costs) for half in (0, 1)]
    shares: dict[str, list[float]] = {}
    for kind, cost in costs:
        row = shares.setdefault(kind, [0.0, 0.0])
        for half, seconds in enumerate(_halves(cost)):
            # Without a prediction, all layers have equal shares.
            row[half] += seconds / totals[half] if totals[half] else 1 / len(costs)
    return {kind: (row[0], row[1]) for kind, row in shares.items()}


def _halves(cost: StrategyCost) -> tuple[float, float]:
    return cost.forward_s, cost.backward_s
