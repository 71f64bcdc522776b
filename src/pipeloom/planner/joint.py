"""Joint choice of packing, order and memory strategies of one batch.

A packing determines the work of each microbatch, and with it warm-up and cool-down, held memory and the balance of
ranks. Its quality can only be judged by scheduling it. Packings into more and fewer microbatches are therefore compared
by static orders. The best few are searched for a while, and the best of these for the rest of the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from pipeloom.errors import InfeasibleError, NothingFoundError
from pipeloom.packing import Loads, Packing, check_budget, cost_loads, group, packed_batch, packing_of
from pipeloom.packing.choices import (
    SLOWER,
    Groups,
    even_microbatches,
    filled_microbatches,
    multiples,
    numbers,
    sub_microbatch_variants,
    walk,
)
from pipeloom.packing.pack import MICROBATCHES_PER_RANK
from pipeloom.packing.policies import least_microbatches
from pipeloom.planner.problem import PlanningProblem
from pipeloom.search import Budget, solve_assignable
from pipeloom.spec import Batch, Layout
from pipeloom.taskgraph import Assignable, TaskGraph
from pipeloom.taskgraph.iteration import headroom_bytes, iteration_graph
from pipeloom.timeline import (
    LowerBound,
    Schedule,
    Timeline,
    assignable_bound,
    host_peaks,
    lower_bound,
    simulate,
    within_limits,
)
from pipeloom.tuning import TuningSpec, tune, tuned_plan
from pipeloom.units import size_text

JUDGING_ORDERS = 4
"""Number of static orders that are tried to judge a packing."""
CLOSING = 0.5
"""Fraction of the gap to its bound that a search is expected to close. Packings are compared by the expected result."""
JUDGING_SHARE = 0.5
"""Judging of another packing may start within this fraction of the budget."""
NEAR = 1.06
"""Packings within this factor of the best estimated time are searched as well."""
FINALISTS_SHARE = 0.5
"""Fraction of the remaining budget for searching the finalists. The rest is for the best of them."""


@dataclass(frozen=True)
class PackingResult:
    """A packing with the best schedule found for it."""

    packing: Packing
    graph: TaskGraph
    schedule: Schedule
    timeline: Timeline
    lower_bound: LowerBound
    evaluations: int
    judged: tuple[tuple[Packing, LowerBound], ...] = ()
    """All packings that were compared, with their bounds for whole backwards. Empty if there was only one packing,
    or if a first plan exceeded the memory and the packings were compared again with a larger reserve."""

    @property
    def ns(self) -> int:
        """The planned time of the iteration."""
        return self.timeline.makespan_ns


def decide(problem: PlanningProblem, batch: Batch, budget: Budget) -> PackingResult:
    """Pack a batch by its packing policy and search an order for it. If the policy is ``planned``, choose both jointly.

    Raises
    ------
    InputError, InfeasibleError
        If the batch cannot be packed or scheduled.
    """
    if problem.tuning is not None and not problem.tuning.searches:
        return tuned(problem, batch)
    if problem.plans_packing:
        return PackingSearch(problem, batch, budget).decide()
    budget = budget.from_now()  # covers packing
    packed = packed_batch(batch, problem.model, problem.layout, problem.costs, problem.packing)
    return ordered(problem, packed, budget)


def tuned(problem: PlanningProblem, batch: Batch) -> PackingResult:
    """Choose packing, 1F1B order and encoder pre-computation by PipeTune's recurrence, in milliseconds.

    Raises
    ------
    NothingFoundError
        If not even the smallest microbatches fit into memory, or offloaded activations exceed the host memory.
    """
    result = _recurrence(problem, batch)
    limit = problem.memory.host_bytes
    if limit is None:
        return result
    peaks = host_peaks(result.graph, result.schedule)
    if (peaks > limit).any():
        rank = int(peaks.argmax())
        raise NothingFoundError(
            f"rank {rank}: holds {size_text(int(peaks[rank]))} of offloaded activations, host_capacity_bytes is "
            f"{size_text(limit)}; use another strategy than offload, or raise the limit"
        )
    return replace(result, graph=replace(result.graph, host_capacity_bytes=np.full_like(peaks, limit)))


def _recurrence(problem: PlanningProblem, batch: Batch) -> PackingResult:
    """Do the same as `tuned`, without a limit of host memory."""
    assert problem.pipeline is not None
    pipeline = problem.pipeline.scaled(problem.costs.factors, problem.costs.slowness)
    pipeline = pipeline.with_reserve(problem.memory.reserve_bytes)
    result = tune(pipeline, batch, problem.packing, problem.tuning, problem.seed)
    plan = tuned_plan(pipeline, batch, result, problem.costs)
    headroom = headroom_bytes(plan.graph, problem.layout, plan.packing, problem.costs, problem.memory)
    graph = replace(plan.graph, capacity_bytes=headroom)
    timeline = simulate(graph, plan.schedule)
    return PackingResult(plan.packing, graph, plan.schedule, timeline, lower_bound(graph), result.evaluations)


def packing_bound(problem: PlanningProblem, packed: Packing, known: LowerBound | None = None) -> LowerBound:
    """Return a lower bound on every schedule of a packing, under any assignment, strategies and splits.

    ``known`` is its bound with whole backwards, if it was computed. If backwards may be split, the graph reserves a
    different number of bytes for a computation, so the bound of one graph does not hold for the other.
    """
    bounds = [known or assignable_bound(_graph(problem.whole_backwards(), packed))]
    if problem.split_backward:
        with suppress(InfeasibleError):
            bounds.append(assignable_bound(_graph(problem, packed)))
    return min(bounds, key=lambda bound: bound.ns)


def least_bound(problem: PlanningProblem, decided: PackingResult) -> LowerBound:
    """Return a lower bound on every schedule of every packing that was compared.

    If backwards may be split, this builds a graph for each packing, so use it for reports and not for planning.
    """
    bounds = [packing_bound(problem, packing, bound) for packing, bound in decided.judged]
    return min([decided.lower_bound, *bounds], key=lambda bound: bound.ns)


def ordered(
    problem: PlanningProblem, packed: Packing, budget: Budget, unsplit: Assignable | None = None
) -> PackingResult:
    """Search an order for one packing. ``unsplit`` is its graph with whole backwards, if it was built.

    If memory is limited, a single split backward reduces the headroom of all tasks. Half of the budget is therefore
    spent on plans without splits, and the faster plan is returned.
    """
    if not problem.split_backward:
        return _searched(problem, packed, unsplit or _graph(problem, packed), budget)
    if problem.memory.capacity_bytes is None:
        return _searched(problem, packed, _graph(problem, packed), budget)
    meter, whole_problem = budget.start(), problem.whole_backwards()
    unsplit = unsplit or _graph(whole_problem, packed)
    meter.reserve(_most_tasks(problem, unsplit.graph))
    whole = _searched(whole_problem, packed, unsplit, meter.rest(0.5))
    meter.used += whole.evaluations
    try:
        graph = _graph(problem, packed)
    except InfeasibleError:
        return whole
    try:
        split = _searched(problem, packed, graph, meter.rest())
    except InfeasibleError:
        split = replace(whole, lower_bound=assignable_bound(graph), evaluations=0)
    best = min(whole, split, key=lambda made: made.ns)
    bound = min(whole.lower_bound, split.lower_bound, key=lambda bound: bound.ns)
    return replace(best, lower_bound=bound, evaluations=whole.evaluations + split.evaluations)


def _most_tasks(problem: PlanningProblem, graph: TaskGraph) -> int:
    """Return the maximum number of tasks of a plan, which determines the time to lower it.

    ``graph`` has whole backwards.
    """
    return graph.num_tasks + (graph.num_pairs if problem.split_backward else 0)


def _graph(problem: PlanningProblem, packed: Packing) -> Assignable:
    return iteration_graph(problem.layout, packed, problem.costs, f"iteration {packed.batch.iteration}", problem.memory)


def _searched(problem: PlanningProblem, packed: Packing, assignable: Assignable, budget: Budget) -> PackingResult:
    best = solve_assignable(
        assignable,
        budget=budget,
        seed=problem.seed,
        method=problem.method,
        threads=problem.threads,
        params=problem.search,
    )
    found = best.solution
    return PackingResult(
        packed, best.assignable.graph, found.schedule, found.timeline, found.lower_bound, found.evaluations
    )


@dataclass(frozen=True)
class _Candidate:
    """A packing with its best static order."""

    result: PackingResult
    unsplit: Assignable
    """Its graph with whole backwards."""
    expected_ns: float
    """Planned time that a search is expected to reach."""
    judging_s: float
    """Seconds that building its graph and trying static orders took."""


class PackingSearch:
    """Searches packing and schedule of one batch jointly.

    The budget has three phases: judge packings by static orders, search the best few, and search the best one.

    Attributes
    ----------
    judged : list of _Candidate
        The packings that fit, in the order of their evaluation.
    bounds : list of (Packing, LowerBound)
        The same packings, and those that were excluded by their lower bounds.
    failure : InfeasibleError or None
        Error of the last packing that did not fit.
    """

    def __init__(self, problem: PlanningProblem, batch: Batch, budget: Budget) -> None:
        check_budget(batch, problem.model, problem.packing.token_budget)
        self.meter = budget.start()
        self.problem, self.batch, self.params = problem, batch, problem.search.packings
        # Whole backwards and the fast choice of strategies suffice to compare packings. Only the best packings are
        # searched with split backwards and a thorough choice.
        self.unsplit = problem.whole_backwards().with_search(problem.search.fast())
        self.tuning = problem.tuning or TuningSpec()
        policy = problem.packing.policy if problem.tuning is None else problem.tuning.pack
        self.packing = msgspec.structs.replace(problem.packing, policy=policy)
        self.judged: list[_Candidate] = []
        self.bounds: list[tuple[Packing, LowerBound]] = []
        self.failure: InfeasibleError | None = None
        self._known: set[object] = set()
        self.loads: Loads = cost_loads(batch, problem.model, problem.layout, problem.costs)

    def decide(self) -> PackingResult:
        """Judge packings, search the best few for a while, and the best of these for the rest of the budget."""
        self.judge_recurrence()
        self.try_numbers()
        self._try_others()
        if not self.judged:
            assert self.failure is not None
            raise self.failure
        order = sorted(self.judged, key=lambda each: each.expected_ns)
        threshold_ns = NEAR * order[0].expected_ns
        finalists = [each for each in order[: self.params.finalists] if each.expected_ns <= threshold_ns]
        self.meter.reserve(max(_most_tasks(self.problem, each.result.graph) for each in finalists))
        best, chosen = min((each.result for each in self.judged), key=lambda result: result.ns), finalists[0]
        begin, count = self.meter.spent, len(finalists)
        while count > 1 and not self._has_time(finalists[:count], begin):
            count -= 1
        if count > 1:
            tried: list[PackingResult] = []
            for i, each in enumerate(finalists[:count], 1):
                until = begin + (1 - begin) * FINALISTS_SHARE * i / count
                tried.append(self._search(each, until))
            chosen = finalists[min(range(count), key=lambda i: tried[i].ns)]
            best = min(best, *tried, key=lambda result: result.ns)
        best = min(best, self._search(chosen, 1.0), key=lambda result: result.ns)
        # The judged packings have whole backwards only.
        bound = packing_bound(self.problem, best.packing, best.lower_bound)
        return replace(best, lower_bound=bound, evaluations=self.meter.used, judged=tuple(self.bounds))

    def estimate(self) -> float:
        """Return the time in ns of the packing that is judged first, or of the one with the smallest microbatches."""
        if not self.problem.plans_packing:
            self.judge(group(self.loads, self.packing, self.batch.iteration))
            return self.best_ns
        least, most = least_microbatches(self.loads, self.packing), len(self.loads)
        for number in (MICROBATCHES_PER_RANK * self.problem.layout.num_ranks, most):
            self._judge_number(min(max(number, least), most))
            if self.judged:
                break
        return self.best_ns

    def try_numbers(self) -> None:
        """Judge packings into more and fewer microbatches, or those that PipeTune's techniques select."""
        usual = MICROBATCHES_PER_RANK * self.problem.layout.num_ranks
        if self.tuning.micro_batch == "fixed":
            self.judge(group(self.loads, self.packing, self.batch.iteration))
        elif self.tuning.micro_batch == "multiples":
            for groups in multiples(self.loads, self.packing, self.tuning.unit_tokens, usual):
                if self._ends_with(0):
                    return
                self.judge(groups)
        else:
            walk(
                numbers(self.loads, self.packing),
                usual,
                SLOWER,
                self.params.misses,
                lambda number: None if self._ends_with(number) else self._judge_number(number),
            )

    def _judge_number(self, number: int) -> float:
        groups = even_microbatches(self.loads, self.packing, number, self.batch.iteration)
        return self.judge(groups)

    def _try_others(self) -> None:
        """Judge other kinds of packings: full microbatches with a light last one, and other sub-microbatches."""
        if self.tuning.micro_batch == "any":
            for groups in filled_microbatches(self.loads, self.packing):
                if self._ends_with(0):
                    return
                self.judge(groups)
        if not self.judged:
            return
        best = min(self.judged, key=lambda each: each.expected_ns).result.packing
        groups = tuple(microbatch.samples for microbatch in best.microbatches)
        for layout in sub_microbatch_variants(self.problem.layout):
            if self._ends_with(0):
                return
            self.judge(groups, layout)

    @property
    def best_ns(self) -> float:
        """Return the shortest iteration of all packings so far."""
        return min((each.result.ns for each in self.judged), default=float("inf"))

    def judge(self, groups: Groups, layout: Layout | None = None) -> float:
        """Return the expected time of a packing in ns.

        Return infinity if it does not fit, was judged before, or cannot be the best. ``layout`` defines other
        sub-microbatches than the layout of the problem.
        """
        packed = packing_of(self.batch, self.problem.model, layout or self.problem.layout, groups)
        if not self._is_new(packed):
            return float("inf")
        began_s = self.meter.elapsed_s()
        try:
            return self._compare(packed, _graph(self.unsplit, packed), began_s)
        except InfeasibleError as error:
            self.failure = error
            return float("inf")

    def judge_recurrence(self) -> None:
        """Judge the packing of PipeTune's recurrence, if the first rank holds all encoders.

        The recurrence compares thousands of packings.
        """
        if self.problem.pipeline is None:
            return
        try:
            result = _recurrence(self.unsplit, self.batch)
            self.meter.used += 1
            self._is_new(result.packing)
            began_s = self.meter.elapsed_s()
            assignable = _graph(self.unsplit, result.packing)
            # Keep the order of the recurrence only if it fits into the memory of this graph.
            graph = assignable.graph
            timeline = simulate(graph, result.schedule)
            if within_limits(graph, result.schedule, timeline):
                plain = replace(result, graph=graph, timeline=timeline, lower_bound=assignable_bound(assignable))
                self._record(plain, assignable, began_s)
            self._compare(result.packing, assignable, began_s)
        except InfeasibleError as error:
            self.failure = error

    def _is_new(self, packed: Packing) -> bool:
        """Return whether a packing was not judged before, and mark it as judged."""
        key = tuple((microbatch.samples, *map(len, microbatch.parts)) for microbatch in packed.microbatches)
        new = key not in self._known
        self._known.add(key)
        return new

    def _compare(self, packed: Packing, assignable: Assignable, began_s: float) -> float:
        """Return the expected time of a graph in ns; infinity if it cannot be the best."""
        bound = assignable_bound(assignable)
        if self.judged and bound.ns >= self.best_ns:
            self.bounds.append((packed, bound))
            return float("inf")
        few = Budget(evaluations=JUDGING_ORDERS)
        result = _searched(self.unsplit, packed, assignable, few)
        self.meter.used += result.evaluations
        return self._record(result, assignable, began_s)

    def _record(self, result: PackingResult, assignable: Assignable, began_s: float) -> float:
        """Record a packing and return its expected time.

        Of two packings with equal static orders, the one with the lower bound is expected to improve more.
        """
        expected_ns = result.ns - CLOSING * (result.ns - result.lower_bound.ns)
        self.bounds.append((result.packing, result.lower_bound))
        self.judged.append(_Candidate(result, assignable, expected_ns, self.meter.elapsed_s() - began_s))
        return expected_ns

    def _ends_with(self, number: int) -> bool:
        """Return whether too little time remains to judge and search a packing into this many microbatches."""
        if not self.judged:
            return False
        last, budget = self.judged[-1], self.meter.budget
        if self.meter.spent >= JUDGING_SHARE:
            return True
        needed_s = (1 + self.params.searching) * last.judging_s * number / len(last.result.packing.microbatches)
        needed_s += budget.task_s * _most_tasks(self.problem, last.result.graph)
        return budget.seconds is not None and self.meter.elapsed_s() + needed_s > budget.seconds

    def _has_time(self, finalists: Sequence[_Candidate], begin: float) -> bool:
        """Return whether the share of the budget for finalists is long enough to search each of them."""
        seconds = self.meter.budget.seconds
        if seconds is None:
            return True
        each_s = seconds * (1 - begin) * FINALISTS_SHARE / len(finalists)
        return all(each_s >= self.params.searching * each.judging_s for each in finalists)

    def _search(self, candidate: _Candidate, until: float) -> PackingResult:
        """Search orders of a packing until this share of the budget is spent."""
        if self.meter.left(1, until) == 0 or self.meter.spent >= until:
            return candidate.result
        result = ordered(self.problem, candidate.result.packing, self.meter.rest(until), candidate.unsplit)
        self.meter.used += result.evaluations
        return result
