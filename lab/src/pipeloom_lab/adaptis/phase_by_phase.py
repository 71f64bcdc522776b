"""AdaPtis' pipeline generator (section 4.3): from baselines, tune the phase that costs most, one at a time.

An order is a rule of the chain kernel, whose admission and readiness are the paper's three policies: forwards, then
backwards, then weight gradients are advanced as far as memory allows; what waits for a message lets other work pass;
and a rank without room runs backwards and weight gradients first. What is tuned is how early each kind goes. There
is no random choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from pipeloom.errors import InputError
from pipeloom.layout.cooptimize.bound import placement_bound
from pipeloom.layout.cooptimize.evaluate import Judge, schedule_of
from pipeloom.layout.cooptimize.joint import CooptimizedPipeline, answer, nothing_fits, uniform_strategies
from pipeloom.layout.cooptimize.kernels.run import NEVER
from pipeloom.layout.cooptimize.layer_chain import LayerChain, PartitionPlacement, rank_work_ns
from pipeloom.layout.cooptimize.rules import PriorityRule
from pipeloom.layout.cooptimize.standard import round_robin, stages, wave
from pipeloom.layout.cooptimize.starts import natural_keys
from pipeloom.layout.cooptimize.walk import WalkReport
from pipeloom.search import Progress
from pipeloom.search.budget import Budget, Meter
from pipeloom.taskgraph import IntArray
from pipeloom.timeline import simulate
from pipeloom_lab.adaptis.phase_moves import bubble_shares, permutations, shifts, transfers
from pipeloom_lab.adaptis.systems import mist_stages

TUNED = ("placement", "schedule", "partition")
"""The phases, by the paper's numbers 1, 2 and 3."""
METHOD = "AdaPtis, phase by phase"
_PIECES = 8
"""Chunks per rank at most."""
_BASELINES = 4
"""Baselines that are tuned, best first; the others are pruned."""
_WAITS = (0.25, 1.0)


@dataclass(frozen=True, slots=True)
class _Order:
    """A rule that outlives a change of the placement."""

    early: float
    """Strides by which backwards go before their place; negative: forwards first."""
    period: int
    shifts: IntArray | None = None
    waits: IntArray | None = None


@dataclass(frozen=True, slots=True)
class _State:
    ns: int
    placement: PartitionPlacement
    order: _Order


def tune_phases(
    chain: LayerChain,
    *,
    budget: Budget,
    phases: tuple[str, ...] = TUNED,
    on_progress: Callable[[Progress], None] | None = None,
) -> CooptimizedPipeline:
    """Choose partition, placement and order of a chain as AdaPtis' generator does.

    Parameters
    ----------
    chain : LayerChain
        With its memory limit; split where its weight times are not 0.
    budget : Budget
        Tuning also ends when no phase can be improved.
    phases : tuple of str
        What may be tuned, of `TUNED`; the rest stays as in S-1F1B.

    Raises
    ------
    InfeasibleError
        When no baseline fits into memory.
    """
    for phase in phases:
        if phase not in TUNED:
            raise InputError("phases", f"{phase!r} is unknown", f"use some of {', '.join(TUNED)}")
    meter = budget.start()
    tuning = _Tuning(chain, phases, meter, on_progress)
    found = tuning.baselines()
    if not found:
        raise nothing_fits(chain)
    bound = placement_bound(chain)
    tuning.target = bound.ns
    reports, best = [], found[0]
    for start in found[:_BASELINES]:
        before = tuning.evaluations
        end = tuning.tune(start)
        reports.append(WalkReport(start.placement, start.ns, end.ns, tuning.evaluations - before))
        best = min(best, end, key=lambda state: state.ns)
        if best.ns <= bound.ns or tuning.over():
            break
    rule = tuning.rule(best.placement, best.order)
    return replace(
        answer(chain, best.placement, rule, bound, METHOD),
        evaluations=tuning.evaluations,
        elapsed_s=meter.elapsed_s(),
        reports=tuple(reports),
        moves=dict(tuning.counts),
    )


class _Tuning:
    """What all baselines' tunings share: the chain, the budget, the counts."""

    def __init__(
        self, chain: LayerChain, phases: tuple[str, ...], meter: Meter, show: Callable[[Progress], None] | None
    ) -> None:
        self.chain, self.phases, self.meter = chain, phases, meter
        self.target = 0
        self.counts = dict.fromkeys(phases, (0, 0, 0))
        self._most = max(1, min(chain.num_layers, _PIECES * chain.num_ranks))
        self._judge = Judge(chain, self._most)
        self._show, self._shown = show, 0.0
        self._best = NEVER

    @property
    def evaluations(self) -> int:
        """Placements that were run."""
        return self._judge.evaluations

    def over(self) -> bool:
        """Whether the budget is spent."""
        self.meter.used = self.evaluations
        return self.meter.left(1) == 0

    def rule(self, placement: PartitionPlacement, order: _Order) -> PriorityRule:
        """The order as keys for these chunks."""
        stride = self._judge.arrays.stride_ns
        keys = natural_keys(self.chain, placement, stride, order.early)
        fits = order.shifts is not None and order.shifts.shape == keys.shape
        shifted = keys + order.shifts if fits else keys  # type: ignore[operator]
        waits = order.waits if fits and order.waits is not None else np.zeros_like(keys)
        return PriorityRule(shifted, waits, order.period)

    def baselines(self) -> list[_State]:
        """Give the paper's starting pipelines with the best of their orders, best first."""
        found = []
        for placement in _standard(self.chain, self.phases):
            for strategy in uniform_strategies(self.chain):
                one = replace(placement, strategies=strategy)
                state = min(
                    (_State(self._run(one, order, NEVER), one, order) for order in self._orders()),
                    key=lambda state: state.ns,
                )
                if state.ns < NEVER:
                    found.append(state)
        return sorted(found, key=lambda state: state.ns)

    def tune(self, state: _State) -> _State:
        """Tune the phase behind most of the bubbles; where that brings nothing, the next; until none does."""
        tuners = {"partition": self._partition, "placement": self._placement, "schedule": self._schedule}
        while not self.over() and state.ns > self.target:
            graph, schedule = schedule_of(self.chain, state.placement, self.rule(state.placement, state.order))
            shares = bubble_shares(graph, simulate(graph, schedule))
            for phase in sorted(self.phases, key=lambda name: -getattr(shares, name)):
                better = tuners[phase](state)
                if better.ns < state.ns:
                    state = better
                    break
            else:
                break
        return state

    def _orders(self) -> Iterator[_Order]:
        """Orders to try with a new placement: forwards first to backwards first."""
        p, m = self.chain.num_ranks, self.chain.num_microbatches
        far = 4.0 * m
        if "schedule" not in self.phases:
            yield _Order(far, min(p, m))
            return
        for early in (far, float(p), 1.0, 0.0, -far / 2):
            for period in sorted({1, min(p, m)}):
                yield _Order(early, period)

    def _run(self, placement: PartitionPlacement, order: _Order, cutoff: int) -> int:
        ns = self._judge.ns(placement, self.rule(placement, order), cutoff)
        if ns < self._best:
            self._best = ns
        if self._show is not None and self.meter.elapsed_s() - self._shown > 0.2:
            self._shown = self.meter.elapsed_s()
            self._show(Progress(self._shown, self.evaluations, self._best, self.target))
        return ns

    def _try(self, phase: str, state: _State, placement: PartitionPlacement) -> _State:
        """A changed placement under the order so far and, where that is not better, under the others."""
        tried, taken, new = self.counts[phase]
        self.counts[phase] = (tried + 1, taken, new)
        plain = state.order.shifts is None
        for order in (state.order, *(o for o in self._orders() if not plain or o != state.order)):
            ns = self._run(placement, order, state.ns)
            if ns < state.ns:
                self.counts[phase] = (tried + 1, taken + 1, new + 1)
                return _State(ns, placement, order)
        return state

    def _partition(self, state: _State) -> _State:
        """Hand layers from the rank that idles least to the one that idles most, while a layer fits between."""
        p = self.chain.num_ranks
        lightest = int(self.chain.total_ns[:, 0].min()) * self.chain.num_microbatches
        improved = True
        while improved and not self.over():
            improved = False
            load = self._loads(state.placement)
            # The widest difference first, then alternatives; with many ranks not all of them.
            pairs = [(a, b) for a in range(p) for b in range(p) if load[a] - load[b] > lightest]
            pairs.sort(key=lambda pair: (load[pair[1]] - load[pair[0]], pair))
            for giver, taker in pairs[: 4 * p]:
                for made in transfers(state.placement, giver, taker):
                    better = self._try("partition", state, made)
                    if better is not state:
                        state, improved = better, True
                        break
                if improved or self.over():
                    break
        return state

    def _placement(self, state: _State) -> _State:
        """Take the best of all permutations, again while one is better; else everything is rolled back."""
        improved = True
        while improved and not self.over():
            improved = False
            best = state
            for made in permutations(state.placement, self._most):
                best = self._try("placement", best, made)
                if self.over():
                    break
            if best is not state:
                state, improved = best, True
        return state

    def _schedule(self, state: _State) -> _State:
        """Choose among the orders anew; then advance or delay F, B and W, rank by rank, with or without waiting."""
        state = self._try("schedule", state, state.placement)
        num = state.placement.num_chunks
        ranks = np.array(state.placement.ranks)
        stride = self._judge.arrays.stride_ns
        improved = True
        while improved and not self.over():
            improved = False
            for rank in np.argsort(self._loads(state.placement)):
                for step in (stride, stride // 4, stride // 16):
                    for change in shifts(num, ranks, int(rank), step):
                        better = self._shifted(state, change)
                        improved = improved or better is not state
                        state = better
                        if self.over():
                            return state
        for c in range(num):
            for kind in range(2):
                for part in _WAITS:
                    state = self._waiting(state, kind, c, int(part * stride))
                    if self.over():
                        return state
        return state

    def _shifted(self, state: _State, change: IntArray) -> _State:
        old = state.order.shifts
        whole = change if old is None or old.shape != change.shape else old + change
        waits = state.order.waits
        kept = waits if waits is not None and waits.shape == change.shape else None
        return self._ordered(state, replace(state.order, shifts=whole, waits=kept))

    def _waiting(self, state: _State, kind: int, chunk: int, ns: int) -> _State:
        shape = (3, state.placement.num_chunks)
        old, waits = state.order.shifts, state.order.waits
        shifted = old if old is not None and old.shape == shape else np.zeros(shape, np.int64)
        patience = waits.copy() if waits is not None and waits.shape == shape else np.zeros(shape, np.int64)
        patience[kind, chunk] = ns
        return self._ordered(state, replace(state.order, shifts=shifted, waits=patience))

    def _ordered(self, state: _State, order: _Order) -> _State:
        tried, taken, new = self.counts["schedule"]
        ns = self._run(state.placement, order, state.ns)
        better = ns < state.ns
        self.counts["schedule"] = (tried + 1, taken + better, new + better)
        return _State(ns, state.placement, order) if better else state

    def _loads(self, placement: PartitionPlacement) -> IntArray:
        """Work of every rank on all microbatches; what it lacks to the makespan is its bubble."""
        return rank_work_ns(self.chain, placement) * self.chain.num_microbatches


def _standard(chain: LayerChain, phases: tuple[str, ...]) -> list[PartitionPlacement]:
    """Partitions of S-1F1B and Mist on one stage a rank; placements of I-1F1B and Hanayo with equal chunks."""
    n, p = chain.num_layers, chain.num_ranks
    if n < p:
        return [PartitionPlacement(tuple(range(n + 1)), tuple(range(n)))]
    found = [stages(chain)]
    if "partition" in phases:
        found.append(mist_stages(chain))
    if "placement" in phases:
        for pieces in (2, 4):
            if n >= pieces * p:
                found += [round_robin(chain, pieces), wave(chain, pieces).merged()]
    return list(dict.fromkeys(found))
