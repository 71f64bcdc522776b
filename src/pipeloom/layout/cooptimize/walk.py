"""One walk of the joint search, which changes a draft step by step in several phases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeloom.compiled.random import below, draw31, uniform
from pipeloom.layout.cooptimize.evaluate import make_scratch
from pipeloom.layout.cooptimize.kernels.anneal import Cooling, WalkArrays, anneal
from pipeloom.layout.cooptimize.kernels.balance import Balance, exchange_layers, repartition
from pipeloom.layout.cooptimize.kernels.draft import ChainArrays, Draft
from pipeloom.layout.cooptimize.kernels.evaluate import evaluate
from pipeloom.layout.cooptimize.kernels.move_table import MOVES
from pipeloom.layout.cooptimize.kernels.moves import BEST, PRESENT, MoveContext
from pipeloom.layout.cooptimize.kernels.run import NEVER
from pipeloom.layout.cooptimize.layer_chain import LayerChain, PartitionPlacement
from pipeloom.layout.cooptimize.params import AnnealParams, CooptimizeParams, WalkPhase
from pipeloom.layout.cooptimize.rules import PriorityRule, copy_of, to_draft
from pipeloom.search import Meter, Progress
from pipeloom.taskgraph import IntArray

_NOTHING = np.empty(0, np.int64)
_SHOW_S = 0.2
"""Seconds between two progress reports."""


@dataclass(frozen=True, slots=True)
class Start:
    """A placement and rule from which a walk may begin, and its makespan in ns."""

    ns: int
    placement: PartitionPlacement
    rule: PriorityRule


@dataclass(slots=True, eq=False)
class Best:
    """The best makespan of all walks in ns, and their total number of evaluations."""

    ns: int
    evaluations: int


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """One joint search.

    ``meter`` counts the evaluations of the starts. Every walk ends at the lower bound ``target_ns``. ``exchanges`` says
    whether single layers may be exchanged.
    """

    chain: LayerChain
    arrays: ChainArrays
    params: CooptimizeParams
    seed: int
    meter: Meter
    target_ns: int
    exchanges: bool
    best: Best
    on_progress: Callable[[Progress], None] | None


@dataclass(frozen=True, slots=True)
class WalkReport:
    """The start and result of one walk."""

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
        Fractions of the time of the whole budget.
    place, count : int
        Number of this walk and of all walks, which get equal quotas of evaluations.
    """

    begin: float
    end: float
    place: int
    count: int


class Walk:
    """The present and best draft of a walk from one start, and counts of its moves."""

    def __init__(self, context: Context, start: Start, number: int) -> None:
        self.start = start
        self.seed = context.seed * 1_000_003 + number
        self.evaluations = 0
        self._context = context
        params, arrays = context.params, context.arrays
        present = to_draft(start.placement, start.rule, arrays.most_chunks)
        self.counts = np.zeros((3, len(MOVES)), np.int64)
        self._drafts = WalkArrays(
            present, copy_of(present), copy_of(present), _weights(context, ordering=False), self.counts
        )
        self._order_weights = _weights(context, ordering=True)
        self._scratch = make_scratch(arrays)
        rng = np.array([self.seed * 0x9E3779B97F4A7C15 % 2**64 or 1], np.uint64)
        for _ in range(4):
            draw31(rng)
        balance = params.balance
        self._moves = MoveContext(
            chain=arrays,
            balance=Balance(balance.tries, balance.exchanges, balance.steps, balance.hot, balance.cold),
            values=np.array([start.ns, start.ns], np.int64),
            rng=rng,
        )
        self._steps = steps_at_once(params.annealing, arrays)

    @property
    def best(self) -> Draft:
        """The best draft so far."""
        return self._drafts.best

    @property
    def best_ns(self) -> int:
        """Makespan of the best draft, in ns."""
        return int(self._moves.values[BEST])

    @property
    def report(self) -> WalkReport:
        """Start, result and number of evaluations of this walk."""
        return WalkReport(self.start.placement, self.start.ns, self.best_ns, self.evaluations)

    def run(self, span: Span) -> None:
        """Run until this walk's part of the budget is spent, or any walk reaches the lower bound."""
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
            if context.on_progress is not None and context.meter.elapsed_s() - shown > _SHOW_S:
                shown = context.meter.elapsed_s()
                context.on_progress(Progress(shown, context.best.evaluations, context.best.ns, context.target_ns))

    def _quota(self, span: Span) -> int | None:
        """Return the number of evaluations for this walk, or None if the budget does not count them."""
        context = self._context
        evaluations = context.meter.budget.evaluations
        if evaluations is None:
            return None
        left = max(0, evaluations - context.meter.used)
        return left * (span.place + 1) // span.count - left * span.place // span.count

    def _spent(self, span: Span, quota: int | None) -> float:
        """Return the spent fraction of the walk's budget, by time or quota, whichever is larger."""
        meter, part = self._context.meter, 0.0
        if meter.budget.seconds is not None:
            spent = meter.spent - span.begin
            part = spent / (span.end - span.begin) if span.end > span.begin else 1.0
        if quota is not None:
            part = max(part, self.evaluations / quota if quota else 1.0)
        return part

    def _phases(self) -> Iterator[tuple[float, WalkPhase]]:
        """Yield the beginning of each possible phase, and the phase. The last phase continues to the end."""
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
        """Run some annealing steps at the temperature for this part of the phase."""
        params = self._context.params.annealing
        # With few evaluations, time is too short to cool down.
        hot = params.hot if self._steps >= params.fewest_steps else params.cold
        heat = self.start.ns * hot * (params.cold / hot) ** max(part, 0.0)
        cooling = Cooling(min(self._steps, left), heat, heat * 0.999)
        target = self._context.target_ns
        ran = int(anneal(self._drafts, self._moves, self._scratch, cooling, target))
        self.evaluations += max(ran, 1)

    def _refine(self, left: int) -> None:
        """Reorder the best of several partitions with less load on the fullest rank, and keep it if it is better.

        If none of them is feasible, the best partition so far is reordered.
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
        """Write the best of up to ``most`` partitions to the present draft. Return the evaluations and its makespan."""
        context, moves, trial = self._context, self._moves, self._drafts.trial
        arrays, rng, target, best_ns = context.arrays, self._moves.rng, context.target_ns, self.best_ns
        may_place = "placement" in context.params.tuned
        draft = Draft(trial.chunks, self.best.strategy)
        runs, found = 0, NEVER
        while runs < most:
            runs += 1
            # A random goal between the best makespan and a point close to the bound.
            goal = target + int((best_ns - target) * context.params.refining.reach * uniform(rng))
            trial.chunks[:] = self.best.chunks
            if context.exchanges and may_place and below(rng, 2) == 0:
                # Exchanging a few layers changes least, so the current order remains suitable.
                if not exchange_layers(draft, arrays, moves.balance, goal, rng):
                    continue
            elif repartition(draft, arrays, moves.balance, may_place, goal, rng) >= best_ns:
                continue
            ns = int(evaluate(draft, arrays, self._scratch, found, _NOTHING))
            if ns < found:
                found = ns
                self._drafts.present.chunks[:] = trial.chunks
        return runs, found

    def _order(self, best: Draft, values: IntArray, left: int) -> int:
        """Anneal only the order of the present draft into ``best`` and ``values``. Return the number of evaluations."""
        params, target, before = self._context.params.refining, self._context.target_ns, self.best_ns
        drafts = self._drafts._replace(best=best, weights=self._order_weights)
        moves = self._moves._replace(values=values)
        runs = 0
        for stage in range(params.stages):
            steps = min(params.steps // params.stages, left - runs)
            # Abandon an order that is too far from the best.
            if steps < 1 or (stage and values[BEST] > before * (1 + params.hope * (params.stages - stage))):
                break
            heat = params.heat * before * 0.1 ** (stage / params.stages)
            cooling = Cooling(steps, heat, heat * 0.1 ** (1 / params.stages))
            ran = int(anneal(drafts, moves, self._scratch, cooling, target))
            runs += max(ran, 1)
        return runs


def steps_at_once(annealing: AnnealParams, arrays: ChainArrays) -> int:
    """Return the number of proposals between two checks of the clock."""
    tasks = 2 * arrays.most_chunks * arrays.num_microbatches
    return max(1, min(annealing.most_steps, annealing.tasks // tasks))


def _weights(context: Context, *, ordering: bool) -> npt.NDArray[np.float64]:
    """Return cumulative weights of the moves, for all that is tuned or for ordering a given partition."""
    params = context.params
    have = {"strategies": int(context.arrays.num_strategies.max()) > 1, "exchanges": context.exchanges, "": True}
    weights = [
        params.move_weights.get(move.name, move.weight) * (move.ordering if ordering else 1.0)
        if move.tunes in params.tuned and have[move.needs]
        else 0.0
        for move in MOVES
    ]
    return np.cumsum(weights)
