"""Iterations whose passes take longer or shorter than planned, as they do on real devices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipeloom.compare.result import BaselineResult
from pipeloom.taskgraph import NS_PER_S
from pipeloom.timeline import simulate


def jittered_s(found: BaselineResult, jitter: float, seed: int, draws: int = 3) -> float:
    """Mean seconds of an iteration in which every pass takes another time than planned, in the planned order.

    Parameters
    ----------
    jitter : float
        Relative standard deviation of a pass; times are log-normal, their means those planned.
    """
    rng = np.random.default_rng(seed)
    chosen = found.schedule.candidate
    graph = found.graph if chosen is None else found.graph.with_candidates(chosen)
    schedule = replace(found.schedule, candidate=None)
    spread = np.sqrt(np.log1p(jitter**2))
    total = 0.0
    for _ in range(draws):
        factor = rng.lognormal(-(spread**2) / 2, spread, graph.num_tasks)
        drawn = replace(graph, duration_ns=np.rint(graph.duration_ns * factor).astype(np.int64))
        total += simulate(drawn, schedule).makespan_ns / NS_PER_S
    return total / draws + found.after_s
