"""The joint search: partition, placement, order and strategies of a chain, annealed together."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from pipeloom.arrange import kernels
from pipeloom.arrange.annealing import MOVES, Annealing, Best, ChainReport, Settings, Start
from pipeloom.arrange.bound import placement_bound
from pipeloom.arrange.evaluate import NEVER, Judge, arrays_of, schedule_of
from pipeloom.arrange.layer_chain import Arrangement, LayerChain
from pipeloom.arrange.rules import Rule, from_plan
from pipeloom.arrange.standard import one_f_one_b_peaks
from pipeloom.arrange.starts import MANY_RANKS, allowed_starts
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.search import Evaluations, Progress
from pipeloom.search.stopping import StoppingRule, Watch
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import LowerBound, Schedule, Timeline, require_feasible, simulate

_FINE, _AMPLE = 3, 1.75
"""Chunks a rank of starts that are annealed where memory is so many times what 1F1B holds."""


@dataclass(frozen=True, slots=True, eq=False)
class Arranged:
    """An answer: where the layers lie and in which order their tasks run, and how far that can be from the best.

    Attributes
    ----------
    lower_bound : LowerBound
        Over all partitions, placements and orders, not only this arrangement's.
    moves : dict
        By name: how often proposed, accepted, and a new best.
    """

    chain: LayerChain
    arrangement: Arrangement
    rule: Rule
    graph: TaskGraph
    schedule: Schedule
    timeline: Timeline
    lower_bound: LowerBound
    evaluations: int
    elapsed_s: float
    method: str
    reports: tuple[ChainReport, ...] = ()
    moves: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """Makespan above the lower bound, relative to it."""
        return self.timeline.makespan_ns / self.lower_bound.ns - 1 if self.lower_bound.ns else 0.0


def arrange(
    chain: LayerChain,
    *,
    budget: StoppingRule,
    seed: int = 0,
    threads: int = 1,
    settings: Settings | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Arranged:
    """Choose partition, placement, order and strategies of a chain of layers together.

    Parameters
    ----------
    chain : LayerChain
        With its memory limit; split where its weight times are not 0.
    budget : StoppingRule
        Under `pipeloom.search.Evaluations` and one thread the answer depends on the seed alone.
    seed : int
    threads : int
    settings : Settings, optional
    on_progress : callable, optional
        Called now and then, from whichever thread.

    Raises
    ------
    InfeasibleError
        When no start fits into memory.
    """
    if threads < 1:
        raise InputError("threads", f"{threads} is below 1")
    chosen = settings or Settings()
    watch = budget.start()
    arrays = arrays_of(chain)
    most = max(1, min(chain.num_layers, chosen.chunks_per_rank * chain.num_ranks))
    found, tried = _try_starts(chain, most, watch, chosen)
    if not found:
        raise nothing_fits(chain)
    bound = placement_bound(chain)
    num_chains = max(chosen.chains, threads)
    best = Best(found[0][0], bound.ns)
    loads_decide, picked = _loads_decide(chain), found
    if loads_decide:
        # Fine starts are mostly not the best to begin with, but they end best.
        picked = [start for start in found if start[1].num_chunks >= _FINE * chain.num_ranks] or found
    picked = [picked[i % len(picked)] for i in range(num_chains)]
    share = watch.share(tried)
    # Thread t runs chains t, t + threads, ...; each has an equal part of what is left of its thread's time.
    rows = [list(range(t, num_chains, threads)) for t in range(threads)]

    def work(row: list[int]) -> list[Annealing]:
        done = []
        for place, i in enumerate(row):
            until = share + (1 - share) * (place + 1) / len(row)
            chain_share = share + (1 - share) * place / len(row)
            one = Annealing(chain, arrays, most, picked[i], seed * 1_000_003 + i, chosen, loads_decide)
            one.run(watch, tried, (i, num_chains), (chain_share, until), best, on_progress)
            done.append(one)
        return done

    if threads == 1:
        chains = work(rows[0])
    else:
        with ThreadPoolExecutor(threads) as pool:
            chains = [one for part in pool.map(work, rows) for one in part]
    winner = min(chains, key=lambda one: (one.best_ns, one.seed))
    arrangement, rule = from_plan(winner.best_plan, winner.best_strategy)
    if found[0][0] < winner.best_ns:  # the coarser start was not annealed
        _, arrangement, rule = found[0]
    counts = sum((one.counts for one in chains), np.zeros((3, kernels.NUM_MOVES), np.int64))
    moves = {name: (int(a), int(b), int(c)) for name, a, b, c in zip(MOVES, *counts, strict=True)}
    return answer(
        chain, arrangement, rule, bound, tried + sum(one.evaluations for one in chains), watch, "joint annealing",
        tuple(one.report for one in chains), moves,
    )  # fmt: skip


def answer(
    chain: LayerChain, arrangement: Arrangement, rule: Rule, bound: LowerBound, evaluations: int, watch: Watch,
    method: str, reports: tuple[ChainReport, ...], moves: dict[str, tuple[int, int, int]],
) -> Arranged:  # fmt: skip
    """Write an arrangement out as a schedule, and have the checker confirm that it can run."""
    graph, schedule = schedule_of(chain, arrangement, rule, method=method)
    timeline = simulate(graph, schedule)
    require_feasible(graph, schedule, timeline)
    return Arranged(
        chain, arrangement, rule, graph, schedule, timeline, bound, evaluations, watch.elapsed_s(), method, reports,
        moves,
    )  # fmt: skip


def _try_starts(chain: LayerChain, most: int, watch: Watch, settings: Settings) -> tuple[list[Start], int]:
    """Judge the starts until their time is over; give the best rule of each placement, best placement first."""
    found: dict[Arrangement, Start] = {}
    judge, tried, uniform = Judge(chain, most), 0, uniform_strategies(chain)
    for arrangement, rule in allowed_starts(chain, most, judge.arrays.stride, settings.phases):
        for strategy in uniform:
            one = Arrangement(arrangement.cuts, arrangement.ranks, strategy)
            ns = judge.ns(one, rule)
            tried += 1
            if ns < NEVER and (one not in found or ns < found[one][0]):
                found[one] = (ns, one, rule)
        if found and watch.share(tried) > settings.starts_share:
            break
    return sorted(found.values(), key=lambda start: start[0]), tried


def _loads_decide(chain: LayerChain) -> bool:
    """Whether few ranks have memory enough that what is on the fullest rank counts, not what fits."""
    if not chain.num_ranks <= min(MANY_RANKS, chain.num_layers):
        return False
    if chain.capacity_bytes is None:
        return True
    return int(chain.capacity_bytes.min()) >= _AMPLE * int(one_f_one_b_peaks(chain).max())


def uniform_strategies(chain: LayerChain) -> list[tuple[int, ...]]:
    """All layers by their first candidate, and all by their leanest."""
    counts = [len(row) for row in chain.strategies]
    if max(counts) == 1:
        return [()]
    leanest = tuple(int(chain.activation_bytes[i, : counts[i]].argmin()) for i in range(chain.num_layers))
    return [(), leanest] if any(leanest) else [()]


def nothing_fits(chain: LayerChain) -> InfeasibleError:
    """Say what the layers need and what there is."""
    assert chain.capacity_bytes is not None
    static = int(chain.static_bytes.sum())
    lean = int(chain.activation_bytes.min(axis=1).sum())
    return InfeasibleError(
        f"no arrangement found that fits: the layers hold {static} bytes before training and {lean} for one "
        f"microbatch, the {chain.num_ranks} ranks have {int(chain.capacity_bytes.sum())} bytes together"
    )


def warm_up() -> None:
    """Compile the kernels, so that no budget pays for it."""
    one = np.ones((2, 1), np.int64)
    chain = LayerChain(
        "warm",
        ("a", "b"),
        1,
        1,
        0,
        one,
        one,
        one * 0,
        one,
        one,
        np.zeros(2, np.int64),
        (("keep",), ("keep",)),
    )
    one_each, rule = (
        Arrangement((0, 1, 2), (0, 0)),
        Rule(np.zeros((3, 2), np.int64), np.zeros((3, 2), np.int64)),
    )
    settings = Settings(refine_from=0.0)
    annealing = Annealing(chain, arrays_of(chain), 2, (4, one_each, rule), 0, settings, exchanges=True)
    annealing.run(Evaluations(60).start(), 0, (0, 1), (0.0, 1.0), Best(NEVER, -1), None)
