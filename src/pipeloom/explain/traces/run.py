"""Combination of the traces of all ranks to one run with stages, iterations and a common clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from pipeloom.errors import InputError
from pipeloom.explain.traces.clocks import clock_shifts
from pipeloom.explain.traces.computations import RankRun, rank_run
from pipeloom.explain.traces.traced import Computation, Iteration, TracedRun, input_of
from pipeloom.io.kineto import RankTrace


def traced_run(traces: Sequence[RankTrace]) -> TracedRun:
    """Combine the traces of a pipeline's ranks, one for each, in any order.

    With replicas or tensor parallelism, give those of one pipeline. Raise `InputError`, which names the file, if ranks
    do not belong together, a stage or an iteration is missing, or clocks cannot be aligned.
    """
    ordered = ordered_traces(traces)
    ranks = [rank_run(trace, position) for position, trace in enumerate(ordered)]
    stage_rank = _stages(ordered, ranks)
    numbers = sorted(set.intersection(*(set(rank.iterations) for rank in ranks)))
    if not numbers:
        had = "; ".join(f"{t.source} has {sorted(r.iterations)}" for t, r in zip(ordered, ranks, strict=True))
        raise InputError("traces", f"no iteration is in all of them: {had}", "record the same steps on every rank")
    iterations = tuple(
        Iteration(
            number,
            tuple(rank.iterations[number] for rank in ranks),
            tuple(rank.posted[number] for rank in ranks),
            tuple(rank.allocated[number] for rank in ranks),
        )
        for number in numbers
    )
    microbatches = _microbatches(ordered, iterations)
    shifts = clock_shifts(ordered, iterations, stage_rank)
    shifted = tuple(_causal(_shifted(iteration, shifts), len(stage_rank)) for iteration in iterations)
    between = [
        after.start_ns - (before.start_ns + before.measured_ns)
        for before, after in pairwise(shifted)
        if after.number == before.number + 1
    ]
    return TracedRun(
        sources=tuple(trace.source for trace in ordered),
        stage_rank=stage_rank,
        num_microbatches=microbatches,
        iterations=shifted,
        clock_shift_ns=shifts,
        between_ns=max(0, round(median(between))) if between else 0,
        on_device=any(trace.kernels for trace in ordered),
    )


def ordered_traces(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """Sort traces by rank; raise if they cannot be of one job."""
    if not traces:
        raise InputError("traces", "there is none", "give a trace of every rank")
    sources: dict[int, str] = {}
    for trace in traces:
        if trace.rank is None:
            if len(traces) > 1:
                raise InputError(trace.source, "does not say its rank", "name the files rank0.json, rank1.json, ...")
            continue
        if trace.rank in sources:
            raise InputError(
                trace.source,
                f"is rank {trace.rank}, and so is {sources[trace.rank]}",
                "give one recording of each rank",
            )
        sources[trace.rank] = trace.source
    first = traces[0]
    for trace in traces:
        if trace.world_size is not None and first.world_size is not None and trace.world_size != first.world_size:
            raise InputError(
                trace.source,
                f"is of a job of {trace.world_size} ranks, {first.source} of one of {first.world_size}",
                "give traces of one job",
            )
    return sorted(traces, key=lambda trace: trace.rank or 0)


def _stages(traces: Sequence[RankTrace], ranks: Sequence[RankRun]) -> tuple[int, ...]:
    """Return the rank of every stage; raise if a stage is on two ranks or missing."""
    rank_of: dict[int, int] = {}
    for position, rank in enumerate(ranks):
        for stage in {one.unit.stage for iteration in rank.iterations.values() for one in iteration}:
            if stage in rank_of:
                raise InputError(
                    traces[position].source,
                    f"has stage {stage}, and so has {traces[rank_of[stage]].source}",
                    "give the ranks of one pipeline, not its replicas",
                )
            rank_of[stage] = position
    missing = next((stage for stage in range(max(rank_of)) if stage not in rank_of), None)
    if missing is not None:
        raise InputError(
            "traces",
            f"stage {missing} is in none of them, stage {max(rank_of)} is",
            "give the traces of all pipeline ranks",
        )
    return tuple(rank_of[stage] for stage in range(len(rank_of)))


def _microbatches(traces: Sequence[RankTrace], iterations: Sequence[Iteration]) -> int:
    """Return the number of microbatches; raise unless all stages have the same in all iterations."""
    first: set[int] = set()
    for iteration in iterations:
        for trace, rank in zip(traces, iteration.ranks, strict=True):
            for stage in {one.unit.stage for one in rank}:
                found = {one.unit.microbatch for one in rank if one.unit.stage == stage}
                first = first or found
                if found != first:
                    raise InputError(
                        trace.source,
                        f"stage {stage} has {len(found)} microbatches in iteration {iteration.number}, "
                        f"others have {len(first)}",
                        "give traces of one job, whose steps all have the same number of microbatches",
                    )
    for iteration in iterations[1:]:
        for trace, rank, of_first in zip(traces, iteration.ranks, iterations[0].ranks, strict=True):
            if {one.unit for one in rank} != {one.unit for one in of_first}:
                raise InputError(
                    trace.source,
                    f"has other computations in iteration {iteration.number} than in {iterations[0].number}",
                    "record steps of one schedule",
                )
    return len(first)


def _causal(iteration: Iteration, num_stages: int) -> Iteration:
    """Count time before the end of a computation's input as waiting, even if the trace shows no wait."""
    ends = {one.unit: one.end_ns for rank in iteration.ranks for one in rank}
    ranks = []
    for rank in iteration.ranks:
        row = []
        for one in rank:
            source = input_of(one.unit, ends, num_stages)
            until = one.received_ns if source is None else min(one.start_ns, ends[source])
            row.append(one._replace(received_ns=max(one.received_ns, until)))
        ranks.append(tuple(row))
    return replace(iteration, ranks=tuple(ranks))


def _shifted(iteration: Iteration, shifts: Sequence[int]) -> Iteration:
    ranks = tuple(tuple(_moved(one, by) for one in rank) for rank, by in zip(iteration.ranks, shifts, strict=True))
    posted = tuple(
        {unit: one._replace(at_ns=one.at_ns + by) for unit, one in of_rank.items()}
        for of_rank, by in zip(iteration.posted, shifts, strict=True)
    )
    return Iteration(iteration.number, ranks, posted, iteration.allocated)


def _moved(one: Computation, by: int) -> Computation:
    return one._replace(
        start_ns=one.start_ns + by,
        end_ns=one.end_ns + by,
        entered_ns=one.entered_ns + by,
        received_ns=one.received_ns + by,
        arrived_ns=None if one.arrived_ns is None else one.arrived_ns + by,
    )
