"""One walk of the joint search: a draft that changes step by step, phase after phase."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeloom.compiled.random import below, draw31, uniform
from pipeloom.layout.cooptimise import kernels
from pipeloom.layout.cooptimise.context import Context, Start
from pipeloom.layout.cooptimise.evaluate import NEVER, make_scratch
from pipeloom.layout.cooptimise.kernels import BEST, MOVES, PRESENT
from pipeloom.layout.cooptimise.layer_chain import PartitionPlacement
from pipeloom.layout.cooptimise.params import AnnealParams, WalkPhase
from pipeloom.layout.cooptimise.rules import copy_of, to_draft
from pipeloom.search import Progress
from pipeloom.taskgraph import IntArray

_NOTHING = np.empty(0, np.int64)
_SHOW_S = 0.2
"""Seconds between two reports of progress."""


@dataclass(frozen=True, slots=True)
class WalkReport:
    """One walk: where it began, where it ended."""

    start: PartitionPlacement
    start_ns: int
    best_ns: int
    evaluations: int


@dataclass(frozen=True, slots=True)
class Span:
    """A walk's part of the budget.

    Attributes
    ----------
    begin, end : float
        Of the whole budget's time.
    place, count : int
        The walk's number among all, which get equal quotas of evaluations.
    """

    begin: float
    end: float
    place: int
    count: int


class Walk:
    """A draft from one start, the best one that it has been, and how it got there."""

    def __init__(self, context: Context, start: Start, number: int) -> None:
        self.start = start
        self.seed = context.seed * 1_000_003 + number
        self.evaluations = 0
        self._context = context
        params, arrays = context.params, context.arrays
        present = to_draft(start.placement, start.rule, arrays.most_chunks)
        self.counts = np.zeros((3, len(MOVES)), np.int64)
        self._drafts = kernels.WalkArrays(
            present, copy_of(present), copy_of(present), _weights(context, ordering=False), self.counts
        )
        self._order_weights = _weights(context, ordering=True)
        self._scratch = make_scratch(arrays)
        rng = np.array([self.seed * 0x9E3779B97F4A7C15 % 2**64 or 1], np.uint64)
        for _ in range(4):
            draw31(rng)
        balance = params.balance
        self._moves = kernels.MoveContext(
            chain=arrays,
            balance=kernels.Balance(balance.tries, balance.exchanges, balance.steps, balance.hot, balance.cold),
            values=np.array([start.ns, start.ns], np.int64),
            rng=rng,
        )
        self._steps = steps_at_once(params.annealing, arrays)

    @property
    def best(self) -> kernels.Draft:
        """The best draft so far."""
        return self._drafts.best

    @property
    def best_ns(self) -> int:
        """Its makespan."""
        return int(self._moves.values[BEST])

    @property
    def report(self) -> WalkReport:
        """What this walk did."""
        return WalkReport(self.start.placement, self.start.ns, self.best_ns, self.evaluations)

    def run(self, span: Span) -> None:
        """Go on until the walk's part of the budget is spent, or any walk is at the lower bound."""
        context, shown = self._context, 0.0
        quota = self._quota(span)
        phases = list(self._phases())
        while context.best.ns > context.target_ns and self._drafts.weights[-1] > 0:
            part = self._spent(span, quota)
            if part >= 1:
                break
            left = NEVER if quota is None else max(1, quota - self.evaluations)
            before = self.evaluations
            begin, phase = next((begin, phase) for begin, phase in phases if part < phase.until)
            if phase.kind == "anneal":
                self._anneal(left, (part - begin) / (phase.until - begin))
            else:
                self._refine(left)
            context.best.ns = min(context.best.ns, self.best_ns)
            context.best.evaluations += self.evaluations - before
            if context.on_progress is not None and context.watch.elapsed_s() - shown > _SHOW_S:
                shown = context.watch.elapsed_s()
                context.on_progress(Progress(shown, context.best.evaluations, context.best.ns, context.target_ns))

    def _quota(self, span: Span) -> int | None:
        """Evaluations of this walk, where the budget counts them."""
        context = self._context
        if context.watch.evaluations is None:
            return None
        left = max(0, context.watch.evaluations - context.tried)
        return left * (span.place + 1) // span.count - left * span.place // span.count

    def _spent(self, span: Span, quota: int | None) -> float:
        """Part of the walk's budget that is spent, by time or by its quota, whichever is further."""
        watch, part = self._context.watch, 0.0
        if watch.seconds is not None:
            spent = watch.share(self.evaluations) - span.begin
            part = spent / (span.end - span.begin) if span.end > span.begin else 1.0
        if quota is not None:
            part = max(part, self.evaluations / quota if quota else 1.0)
        return part

    def _phases(self) -> Iterator[tuple[float, WalkPhase]]:
        """Where each phase begins, and the phase, without those that cannot be; the last goes on to the end."""
        params = self._context.params
        refines = {"partition", "schedule"} <= set(params.tuned) and self._steps >= params.annealing.fewest_steps
        phases = [phase for phase in params.phases if refines or phase.kind != "refine"]
        phases = phases or [WalkPhase(kind="anneal", until=1.0)]
        begin = 0.0
        for i, phase in enumerate(phases):
            until = 1.0 if i == len(phases) - 1 else phase.until
            if until > begin:
                yield begin, WalkPhase(kind=phase.kind, until=until)
                begin = until

    def _anneal(self, left: int, part: float) -> None:
        """Some steps of annealing all, at the temperature of this part of the phase."""
        params = self._context.params.annealing
        # Few evaluations leave no time to cool down.
        hot = params.hot if self._steps >= params.fewest_steps else params.cold
        heat = self.start.ns * hot * (params.cold / hot) ** max(part, 0.0)
        cooling = kernels.Cooling(min(self._steps, left), heat, heat * 0.999)
        target = self._context.target_ns
        ran = int(kernels.anneal(self._drafts, self._moves, self._scratch, cooling, target))
        self.evaluations += max(ran, 1)

    def _refine(self, left: int) -> None:
        """Take the best of some partitions with less on the fullest rank, order it anew, keep it if it is better.

        As long as the best one's own order can be better, that partition is among them, and stays the best of them.
        """
        present, best, values = self._drafts.present, self._drafts.best, self._moves.values
        before = self.best_ns
        runs, found = self._repartition(min(self._context.params.refining.partitions, left))
        if found >= NEVER:
            found = before
            present.chunks[:] = best.chunks
        present.strategy[:] = best.strategy
        ordered = copy_of(present)
        ordered_values = np.array([found, found], np.int64)
        runs += self._order(ordered, ordered_values, left - runs)
        self.evaluations += runs
        if ordered_values[BEST] < before:
            values[:] = ordered_values[BEST]
            best.chunks[:], best.strategy[:] = ordered.chunks, ordered.strategy
        present.chunks[:], present.strategy[:], values[PRESENT] = best.chunks, best.strategy, values[BEST]

    def _repartition(self, most: int) -> tuple[int, int]:
        """Leave the best of at most so many partitions in the present draft: evaluations made, and its makespan."""
        context, moves, trial = self._context, self._moves, self._drafts.trial
        arrays, rng, target, best_ns = context.arrays, self._moves.rng, context.target_ns, self.best_ns
        may_place = "placement" in context.params.tuned
        draft = kernels.Draft(trial.chunks, self.best.strategy)
        runs, found = 0, NEVER
        while runs < most:
            runs += 1
            # How ambitious: anywhere from a little below the best makespan to most of the way to the bound.
            goal = target + int((best_ns - target) * context.params.refining.reach * uniform(rng))
            trial.chunks[:] = self.best.chunks
            if context.exchanges and may_place and below(rng, 2) == 0:
                # Least is changed, so the order so far suits best, where a few layers change places.
                if not kernels.exchange_layers(draft, arrays, moves.balance, goal, rng):
                    continue
            elif kernels.repartition(draft, arrays, moves.balance, may_place, goal, rng) >= best_ns:
                continue
            ns = int(kernels.evaluate(draft, arrays, self._scratch, found, _NOTHING))
            if ns < found:
                found = ns
                self._drafts.present.chunks[:] = trial.chunks
        return runs, found

    def _order(self, best: kernels.Draft, values: IntArray, left: int) -> int:
        """Anneal the present draft's order alone, the best into ``best`` and ``values``; return how many were run."""
        params, target, before = self._context.params.refining, self._context.target_ns, self.best_ns
        drafts = self._drafts._replace(best=best, weights=self._order_weights)
        moves = self._moves._replace(values=values)
        runs = 0
        for stage in range(params.stages):
            steps = min(params.steps // params.stages, left - runs)
            # Far from the best after some of the work, it is given up.
            if steps < 1 or (stage and values[BEST] > before * (1 + params.hope * (params.stages - stage))):
                break
            heat = params.heat * before * 0.1 ** (stage / params.stages)
            cooling = kernels.Cooling(steps, heat, heat * 0.1 ** (1 / params.stages))
            ran = int(kernels.anneal(drafts, moves, self._scratch, cooling, target))
            runs += max(ran, 1)
        return runs


def steps_at_once(annealing: AnnealParams, arrays: kernels.ChainArrays) -> int:
    """How many proposals run between two looks at the clock."""
    tasks = 2 * arrays.most_chunks * arrays.num_microbatches
    return max(1, min(annealing.most_steps, annealing.tasks // tasks))


def _weights(context: Context, *, ordering: bool) -> npt.NDArray[np.float64]:
    """Running sums of how often each move is tried: all that is tuned, or while a given partition is ordered."""
    params = context.params
    have = {"strategies": int(context.arrays.num_strategies.max()) > 1, "exchanges": context.exchanges, "": True}
    weights = [
        params.move_weights.get(move.name, move.weight) * (move.ordering if ordering else 1.0)
        if move.tunes in params.tuned and have[move.needs]
        else 0.0
        for move in MOVES
    ]
    return np.cumsum(weights)
