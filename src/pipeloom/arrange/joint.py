"""The joint search: partition, placement, order and strategies of a chain, annealed together."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from pipeloom.arrange import kernels
from pipeloom.arrange.bound import placement_bound
from pipeloom.arrange.evaluate import NEVER, Arrays, Judge, Scratch, arrays_of, schedule_of
from pipeloom.arrange.layer_chain import Arrangement, LayerChain
from pipeloom.arrange.starts import Rule, allowed_starts, from_plan, to_plan
from pipeloom.compiled.random import draw31
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.search import Evaluations, Progress
from pipeloom.search.stopping import StoppingRule, Watch
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import LowerBound, Schedule, Timeline, require_feasible, simulate

MOVES = (
    "turns of microbatches", "cut a chunk", "exchange two ranks", "permute ranks", "shift a key", "shift many keys",
    "wait", "move a boundary", "relabel a suffix", "join chunks", "another rank", "move two boundaries",
    "cut and join", "copy a key", "strategy of layers", "relieve a rank by boundaries", "relieve a rank",
)  # fmt: skip
PHASES = {
    "partition": (7, 11, 15),
    "placement": (1, 2, 3, 8, 9, 10, 12, 16),
    "schedule": (0, 4, 5, 6, 13),
    "strategies": (14,),
}
"""Moves by what they change; cutting and joining chunks makes a placement finer or coarser."""
_WEIGHTS = (1.5, 1.5, 1.0, 1.0, 1.0, 1.0, 0.8, 1.0, 0.7, 0.7, 0.5, 1.0, 0.5, 0.3, 1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Settings:
    """How the search anneals; the defaults were chosen on the measured models (``docs/arrange.md``).

    Attributes
    ----------
    chunks_per_rank : int
        Most chunks, per rank.
    chains : int
        Annealings, each from a start of its own; at least one a thread.
    hot, cold : float
        First and last temperature, relative to the makespan of the start.
    starts_share : float
        Part of the budget that may go into trying starts.
    phases : tuple of str
        What may be tuned, of `PHASES`; for ablations. Without ``partition`` chunks have equally many layers at the
        start; without ``placement`` there is one stage on each rank; without ``schedule`` backwards go first.
    """

    chunks_per_rank: int = 3
    chains: int = 4
    hot: float = 0.01
    cold: float = 0.0003
    starts_share: float = 0.3
    phases: tuple[str, ...] = tuple(PHASES)

    def __post_init__(self) -> None:
        """Refuse settings that anneal nothing."""
        for name in ("chunks_per_rank", "chains"):
            if getattr(self, name) < 1:
                raise InputError(name, f"{getattr(self, name)} is below 1")
        for phase in self.phases:
            if phase not in PHASES:
                raise InputError("phases", f"{phase!r} is unknown", f"use some of {', '.join(PHASES)}")
        if not 0 < self.cold <= self.hot:
            raise InputError("cold", f"{self.cold:g} is not between 0 and hot, {self.hot:g}")


@dataclass(frozen=True, slots=True)
class ChainReport:
    """One annealing: where it began, where it ended."""

    start: Arrangement
    start_ns: int
    best_ns: int
    evaluations: int


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


@dataclass(slots=True, eq=False)
class _Best:
    """What the threads share: the best of all, and whether to stop."""

    ns: int
    target: int


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
    best = _Best(found[0][0], bound.ns)
    picked = [found[i % len(found)] for i in range(num_chains)]
    share = watch.share(tried)
    # Thread t runs chains t, t + threads, ...; each has an equal part of what is left of its thread's time.
    rows = [list(range(t, num_chains, threads)) for t in range(threads)]

    def work(row: list[int]) -> list[_Annealing]:
        done = []
        for place, i in enumerate(row):
            until = share + (1 - share) * (place + 1) / len(row)
            chain_share = share + (1 - share) * place / len(row)
            one = _Annealing(chain, arrays, most, picked[i], seed * 1_000_003 + i, chosen)
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
    graph, schedule = schedule_of(chain, arrangement, rule, method="joint annealing")
    timeline = simulate(graph, schedule)
    require_feasible(graph, schedule, timeline)
    counts = sum((one.counts for one in chains), np.zeros((3, kernels.NUM_MOVES), np.int64))
    moves = {name: (int(a), int(b), int(c)) for name, a, b, c in zip(MOVES, *counts, strict=True)}
    return Arranged(
        chain, arrangement, rule, graph, schedule, timeline, bound, tried + sum(one.evaluations for one in chains),
        watch.elapsed_s(), "joint annealing", tuple(one.report for one in chains), moves,
    )  # fmt: skip


_Start = tuple[int, Arrangement, Rule]


def _try_starts(chain: LayerChain, most: int, watch: Watch, settings: Settings) -> tuple[list[_Start], int]:
    """Judge the starts until their time is over; give the best rule of each placement, best placement first."""
    found: dict[Arrangement, _Start] = {}
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


class _Annealing:
    """One chain of candidates, from one start."""

    def __init__(
        self, chain: LayerChain, arrays: Arrays, most: int, start: _Start, seed: int, settings: Settings
    ) -> None:
        self.start_ns, self.start, rule = start
        self.seed = seed
        self.evaluations = 0
        self._arrays, self._most, self._settings = arrays, most, settings
        self._plan = to_plan(self.start, rule, most)
        strategy = self.start.strategies or (0,) * chain.num_layers
        self._strategy = np.array(strategy, dtype=np.int64)
        self.best_plan, self.best_strategy = self._plan.copy(), self._strategy.copy()
        self._values = np.array([self.start_ns, self.start_ns], np.int64)
        self._trial, self._trial_strategy = self._plan.copy(), self._strategy.copy()
        self._scratch = Scratch(arrays, most)
        self._rng = np.array([seed * 0x9E3779B97F4A7C15 % 2**64 or 1], np.uint64)
        for _ in range(4):
            draw31(self._rng)
        self.counts = np.zeros((3, kernels.NUM_MOVES), np.int64)
        several = int(arrays.num_strategies.max()) > 1
        weights = np.zeros(kernels.NUM_MOVES)
        for phase in settings.phases:
            if phase != "strategies" or several:
                weights[list(PHASES[phase])] = np.array(_WEIGHTS)[list(PHASES[phase])]
        self._weights = np.cumsum(weights)

    @property
    def best_ns(self) -> int:
        """Best makespan so far."""
        return int(self._values[1])

    @property
    def report(self) -> ChainReport:
        """What this chain did."""
        return ChainReport(self.start, self.start_ns, self.best_ns, self.evaluations)

    def run(
        self,
        watch: Watch,
        tried: int,
        place: tuple[int, int],
        span: tuple[float, float],
        best: _Best,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        """Anneal until this chain's part of the budget is spent, or any chain is at the lower bound.

        Time is shared by ``span`` (of the whole budget), evaluations in equal quotas (``place`` of how many).
        """
        arrays, settings = self._arrays, self._settings
        tasks = 2 * self._most * arrays.num_microbatches
        batch = max(1, min(1000, 200_000 // tasks))
        quota = None
        if watch.evaluations is not None:
            left = max(0, watch.evaluations - tried)
            quota = left * (place[0] + 1) // place[1] - left * place[0] // place[1]
        shown = 0.0
        while best.ns > best.target and self._weights[-1] > 0:
            # How far this chain is, by time or by its quota, whichever is further.
            part = 0.0
            if watch.seconds is not None:
                spent = watch.share(self.evaluations) - span[0]
                part = spent / (span[1] - span[0]) if span[1] > span[0] else 1.0
            if quota is not None:
                part = max(part, self.evaluations / quota if quota else 1.0)
            if part >= 1:
                break
            heat = self.start_ns * settings.hot * (settings.cold / settings.hot) ** max(part, 0.0)
            steps = batch if quota is None else max(1, min(batch, quota - self.evaluations))
            ran = int(kernels.anneal(
                self._plan, self._strategy, self.best_plan, self.best_strategy, self._values, arrays.layers,
                arrays.num_strategies, *arrays.problem, self._most, best.target, heat, heat * 0.999, steps,
                self._weights, self._rng, self._trial, self._trial_strategy, self._scratch.ints, self._scratch.end,
                self.counts,
            ))  # fmt: skip
            self.evaluations += max(ran, 1)
            if self.best_ns < best.ns:
                best.ns = self.best_ns
            if on_progress is not None and watch.elapsed_s() - shown > 0.2:
                shown = watch.elapsed_s()
                on_progress(Progress(watch.elapsed_s(), self.evaluations, best.ns, best.target))


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
    rule = Rule(np.zeros((3, 1), np.int64), np.zeros((3, 1), np.int64))
    annealing = _Annealing(chain, arrays_of(chain), 1, (4, Arrangement((0, 2), (0,)), rule), 0, Settings())
    annealing.run(Evaluations(3).start(), 0, (0, 1), (0.0, 1.0), _Best(NEVER, -1), None)
