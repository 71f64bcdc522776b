"""Explanation of Megatron-LM's timers: costs of ranks, the simulated schedule, and possible gains."""

from __future__ import annotations

from dataclasses import dataclass

from pipeloom.cost.layers import LayerCost, LayerTable
from pipeloom.explain.traces.explained import WhatIf, what_if
from pipeloom.explain.traces.replay import chain_graph
from pipeloom.explain.traces.traced import TracedRun, Unit
from pipeloom.io.megatron_log import MegatronTimers
from pipeloom.limits import MAX_TASKS
from pipeloom.search import Budget, interleaved_one_f_one_b, one_f_one_b
from pipeloom.taskgraph import BACKWARD, FORWARD, NS_PER_S
from pipeloom.totals import check_work


@dataclass(frozen=True, slots=True, eq=False)
class TimersExplained:
    """Timers, the layers derived from them, and orders with these costs."""

    timers: MegatronTimers
    layers: LayerTable
    what_if: WhatIf

    @property
    def simulated_s(self) -> float:
        """Time of (interleaved) 1F1B with the timers' means and without message times."""
        return self.what_if.as_traced_timeline.makespan_ns / NS_PER_S

    @property
    def compute_s(self) -> tuple[float, ...]:
        """Compute time of every pipeline rank."""
        return tuple(f + b for f, b in zip(self.timers.forward_s, self.timers.backward_s, strict=True))


def explain_timers(timers: MegatronTimers, name: str, *, budget: Budget, seed: int = 0) -> TimersExplained:
    """Explain the timers of a Megatron-LM run.

    Timers are sums over an iteration, so all microbatches, and all chunks of a rank, are assumed to be equal. They have
    neither an order nor messages, so Megatron-LM's order is assumed, without message times.
    """
    ranks, chunks = len(timers.forward_s), timers.chunks_per_rank
    parts = timers.num_microbatches * chunks
    check_work(f"{timers.source}: microbatches", 2 * ranks * parts, "tasks", MAX_TASKS, "give --microbatches")
    run = TracedRun(
        sources=(timers.source,) * ranks,
        stage_rank=tuple(range(ranks)) * chunks,
        num_microbatches=timers.num_microbatches,
        iterations=(),
        clock_shift_ns=(0,) * ranks,
        between_ns=0,
        on_device=True,
    )
    layers = tuple(
        LayerCost(f"stage.{stage}", timers.forward_s[rank] / parts, 0, 0, backward_s=timers.backward_s[rank] / parts)
        for stage, rank in enumerate(run.stage_rank)
    )
    durations = {}
    for stage, layer in enumerate(layers):
        for microbatch in range(timers.num_microbatches):
            durations[Unit(FORWARD, stage, microbatch)] = round(layer.forward_s * NS_PER_S)
            durations[Unit(BACKWARD, stage, microbatch)] = round(layer.total_backward_s * NS_PER_S)
    order = (interleaved_one_f_one_b if chunks > 1 else one_f_one_b)(chain_graph(run, name, durations, {}))
    table = LayerTable(name, ranks, timers.num_microbatches, 0.0, 0, layers)
    return TimersExplained(timers, table, what_if(run, name, durations, {}, order, budget=budget, seed=seed))
