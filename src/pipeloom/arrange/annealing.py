"""One annealing of the joint search: a candidate that changes step by step, and at last its partition alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeloom.arrange import kernels
from pipeloom.arrange.evaluate import NEVER, Arrays, Scratch
from pipeloom.arrange.layer_chain import Arrangement, LayerChain
from pipeloom.arrange.rules import Rule, to_plan
from pipeloom.compiled.random import below, draw31, uniform
from pipeloom.errors import InputError
from pipeloom.search import Progress
from pipeloom.search.stopping import Watch

MOVES = (
    "turns of microbatches", "cut a chunk", "exchange two ranks", "permute ranks", "shift a key", "shift many keys",
    "wait", "move a boundary", "relabel a suffix", "join chunks", "another rank", "move two boundaries",
    "cut and join", "copy a key", "strategy of layers", "relieve a rank by boundaries", "relieve a rank",
    "limit what is in flight", "spread of keys", "exchange layers",
)  # fmt: skip
PHASES = {
    "partition": (7, 11, 15),
    "placement": (1, 2, 3, 8, 9, 10, 12, 16, 19),
    "schedule": (0, 4, 5, 6, 13, 17, 18),
    "strategies": (14,),
}
"""Moves by what they change; cutting and joining chunks makes a placement finer or coarser."""
_WEIGHTS = (1.5, 1.5, 1.0, 1.0, 1.0, 1.0, 0.8, 1.0, 0.7, 0.7, 0.5, 1.0, 0.5, 0.3, 1.0, 1.0, 1.0, 0.5, 0.3, 1)


_REBALANCE = (15, 16)
_EXCHANGE = 19
_SELDOM = 0.3
"""Weight of moves of boundaries and strategies while refining."""
_LEAST_BATCH = 100
_PARTITIONS, _STEPS, _FARTHEST = 20, 300, 0.7
"""Refining: partitions tried by loads, steps for each, and how far towards the bound they may aim."""
_ORDERS, _STAGES, _HEAT, _HOPE = 1500, 4, 0.004, 0.004
"""Refining: changes of the order, in how many stages, first temperature, and how far behind a stage may begin."""
_NOTHING = np.empty(0, np.int64)


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
    refine_from : float
        Part of its budget after which a chain no longer anneals all, but looks for partitions with less on the
        fullest rank and orders each anew; 1: never. Not done where a thousand evaluations take too long.
    phases : tuple of str
        What may be tuned, of `PHASES`; for ablations. Without ``partition`` chunks have equally many layers at the
        start; without ``placement`` there is one stage on each rank; without ``schedule`` backwards go first.
    """

    chunks_per_rank: int = 4
    chains: int = 4
    hot: float = 0.005
    cold: float = 0.0003
    starts_share: float = 0.3
    refine_from: float = 0.5
    phases: tuple[str, ...] = tuple(PHASES)

    def __post_init__(self) -> None:
        """Refuse settings that anneal nothing."""
        for name in ("chunks_per_rank", "chains"):
            if getattr(self, name) < 1:
                raise InputError(name, f"{getattr(self, name)} is below 1")
        for phase in self.phases:
            if phase not in PHASES:
                raise InputError("phases", f"{phase!r} is unknown", f"use some of {', '.join(PHASES)}")
        if not 0 <= self.refine_from <= 1:
            raise InputError("refine_from", f"{self.refine_from:g} is not between 0 and 1")
        if not 0 < self.cold <= self.hot:
            raise InputError("cold", f"{self.cold:g} is not between 0 and hot, {self.hot:g}")


@dataclass(frozen=True, slots=True)
class ChainReport:
    """One annealing: where it began, where it ended."""

    start: Arrangement
    start_ns: int
    best_ns: int
    evaluations: int


@dataclass(slots=True, eq=False)
class Best:
    """What the threads share: the best of all, and whether to stop."""

    ns: int
    target: int


Start = tuple[int, Arrangement, Rule]
"""Makespan in ns, and what it is of."""


class Annealing:
    """One chain of candidates, from one start; with ``exchanges`` single layers may change places."""

    def __init__(
        self, chain: LayerChain, arrays: Arrays, most: int, start: Start, seed: int, settings: Settings,
        exchanges: bool = False,
    ) -> None:  # fmt: skip
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
        if not exchanges:
            weights[_EXCHANGE] = 0.0
        self._weights = np.cumsum(weights)
        # Refining orders a given partition, and may still move a boundary now and then.
        for phase, share in (("partition", _SELDOM), ("placement", 0.0), ("strategies", _SELDOM)):
            weights[list(PHASES[phase])] *= share
        weights[list(_REBALANCE)] = 0.0
        self._order_weights = np.cumsum(weights)
        self._may_place = "placement" in settings.phases
        self._exchanges = exchanges and self._may_place
        self._refines = {"partition", "schedule"} <= set(settings.phases) and settings.refine_from < 1

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
        best: Best,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        """Anneal until this chain's part of the budget is spent, or any chain is at the lower bound.

        Time is shared by ``span`` (of the whole budget), evaluations in equal quotas (``place`` of how many).
        """
        arrays, settings = self._arrays, self._settings
        tasks = 2 * self._most * arrays.num_microbatches
        batch = max(1, min(1000, 200_000 // tasks))
        annealed = settings.refine_from if self._refines and batch >= _LEAST_BATCH else 1.0
        # Few evaluations leave no time to cool down.
        hot = settings.hot if batch >= _LEAST_BATCH else settings.cold
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
            left = NEVER if quota is None else max(1, quota - self.evaluations)
            if part >= annealed:
                self._refine(left, best)
                continue
            heat = self.start_ns * hot * (settings.cold / hot) ** max(part / annealed, 0.0)
            steps = min(batch, left)
            ran = int(kernels.anneal(
                self._plan, self._strategy, self.best_plan, self.best_strategy, self._values, arrays.layers,
                arrays.num_strategies, *arrays.problem, self._most, best.target, heat, heat * 0.999, steps,
                self._weights, self._rng, self._trial, self._trial_strategy, self._scratch.ints, self._scratch.end,
                self.counts,
            ))  # fmt: skip
            self.evaluations += max(ran, 1)
            best.ns = min(best.ns, self.best_ns)
            if on_progress is not None and watch.elapsed_s() - shown > 0.2:
                shown = watch.elapsed_s()
                on_progress(Progress(watch.elapsed_s(), self.evaluations, best.ns, best.target))

    def _refine(self, left: int, best: Best) -> None:
        """Take the best of some partitions with less on the fullest rank, order it anew, keep it if it is better.

        A partition that is better by loads is mostly worse under the order so far, so annealing rejects it. As long as
        the best one's own order can be better, that partition is among them, and stays the best of them.
        """
        arrays, until, values = self._arrays, best.target, np.full(2, NEVER, np.int64)
        runs = 0
        while runs < min(_PARTITIONS, left):
            runs += 1
            # How ambitious: anywhere from a little below the best makespan to most of the way to the bound.
            goal = until + int((self.best_ns - until) * _FARTHEST * uniform(self._rng))
            self._trial[:] = self.best_plan
            given = (self._trial, self.best_strategy, arrays.layers, len(arrays.room))
            if self._exchanges and below(self._rng, 2) == 0:
                # Least is changed, so the order so far suits best, where a few layers change places.
                if not kernels.exchange_layers(
                    *given, self._most, arrays.num_microbatches, arrays.delay, goal, self._rng
                ):
                    continue
            else:
                fullest = kernels.repartition(
                    *given, arrays.num_microbatches, arrays.delay, self._may_place, goal, _STEPS, self._rng
                )
                if fullest >= self.best_ns:
                    continue
            ns = int(kernels.evaluate(
                self._trial, arrays.layers, self.best_strategy, *arrays.problem, int(values[0]), self._scratch.ints,
                self._scratch.end, _NOTHING,
            ))  # fmt: skip
            if ns < values[0]:
                values[:] = ns
                self._plan[:] = self._trial
        if values[0] >= NEVER:
            values[:] = self.best_ns
            self._plan[:] = self.best_plan
        self._strategy[:] = self.best_strategy
        plan, strategy = self._plan.copy(), self._strategy.copy()
        for stage in range(_STAGES):
            steps = min(_ORDERS // _STAGES, left - runs)
            # Far from the best after some of the work, it is given up.
            if steps < 1 or (stage and values[1] > self.best_ns * (1 + _HOPE * (_STAGES - stage))):
                break
            heat = _HEAT * self.best_ns * 0.1 ** (stage / _STAGES)
            ran = int(kernels.anneal(
                self._plan, self._strategy, plan, strategy, values, arrays.layers, arrays.num_strategies,
                *arrays.problem, self._most, until, heat, heat * 0.1 ** (1 / _STAGES), steps, self._order_weights,
                self._rng, self._trial, self._trial_strategy, self._scratch.ints, self._scratch.end, self.counts,
            ))  # fmt: skip
            runs += max(ran, 1)
        self.evaluations += runs
        if values[1] < self.best_ns:
            self._values[:] = values[1]
            self.best_plan[:], self.best_strategy[:] = plan, strategy
            best.ns = min(best.ns, self.best_ns)
