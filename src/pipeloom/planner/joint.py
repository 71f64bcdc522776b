"""One batch's packing, order and memory strategies, decided together.

A packing decides how much work a microbatch is, and so how long a pipeline fills and drains, how much is held at once,
and how even the ranks are; only a schedule tells. So packings into more and fewer microbatches are compared by their
static orders, the best of them are searched, and the best of these for the rest of the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from pipeloom.errors import InfeasibleError
from pipeloom.packing import Loads, Packing, check_budget, cost_loads, group, packed_batch, packing_of
from pipeloom.packing.choices import Groups, cut_layouts, even_groups, filled_groups, multiples, numbers, walk
from pipeloom.packing.pack import MICROBATCHES_PER_RANK
from pipeloom.planner.problem import Problem
from pipeloom.search import Begun, Evaluations, StoppingRule, solve_assignable
from pipeloom.search.stopping import Meter, Until
from pipeloom.spec import Batch, Layout
from pipeloom.taskgraph import Assignable, TaskGraph
from pipeloom.taskgraph.iteration import iteration_graph, room_bytes
from pipeloom.timeline import LowerBound, Schedule, Timeline, assignable_bound, lower_bound, simulate, within_limits
from pipeloom.tuning import TuningSpec, tune, tuned_plan


@dataclass(frozen=True)
class Decided:
    """A packing with the best schedule found for it."""

    packing: Packing
    graph: TaskGraph
    schedule: Schedule
    timeline: Timeline
    lower_bound: LowerBound
    evaluations: int
    judged: tuple[tuple[Packing, LowerBound], ...] = ()
    """Every packing that was compared, and its bound with whole backwards; empty: there was one packing."""

    @property
    def ns(self) -> int:
        """Planned iteration."""
        return self.timeline.makespan_ns


def decide(problem: Problem, batch: Batch, budget: StoppingRule, seed: int, method: str = "default") -> Decided:
    """Pack a batch and search an order for it: by its policy, or, where that is ``planned``, both together.

    Raises
    ------
    InputError, InfeasibleError
        The batch cannot be packed or scheduled.
    """
    if problem.tuning is not None and not problem.tuning.searches:
        return tuned(problem, batch, seed)
    if problem.plans_packing:
        return _Packings(problem, batch, budget, seed, method).decide()
    # The watch starts before anything is packed.
    budget = Begun(budget.start())
    packed = packed_batch(batch, problem.model, problem.layout, problem.costs, problem.packing)
    return ordered(problem, packed, budget, seed, method)


def tuned(problem: Problem, batch: Batch, seed: int) -> Decided:
    """Packing, 1F1B's order and encoder pre-computation by PipeTune's recurrence, in milliseconds.

    Raises
    ------
    NothingFoundError
        Not even the smallest microbatches fit into memory.
    """
    assert problem.pipeline is not None
    pipeline = problem.pipeline.scaled(problem.costs.factors, problem.costs.slowness).sparing(problem.spare_bytes)
    found = tune(pipeline, batch, problem.packing.token_budget, problem.tuning, seed)
    plan = tuned_plan(pipeline, batch, found, problem.costs)
    room = room_bytes(plan.graph, problem.layout, plan.packing, problem.costs, problem.memory)
    graph = replace(plan.graph, capacity_bytes=room)
    timeline = simulate(graph, plan.schedule)
    return Decided(plan.packing, graph, plan.schedule, timeline, lower_bound(graph), found.evaluations)


def packing_bound(problem: Problem, packed: Packing, known: LowerBound | None = None) -> LowerBound:
    """Return a bound that no schedule of a packing beats, under any assignment, strategies and splits.

    ``known`` is its bound with whole backwards, where that has been made. Where backwards may be split, that is another
    graph, which reserves other bytes for a computation, so neither bound holds for both.
    """
    bounds = [known or assignable_bound(_graph(problem.whole_backwards(), problem.layout, packed))]
    if problem.split_backward:
        with suppress(InfeasibleError):
            bounds.append(assignable_bound(_graph(problem, problem.layout, packed)))
    return min(bounds, key=lambda bound: bound.ns)


def least_bound(problem: Problem, decided: Decided) -> LowerBound:
    """Return a bound that no packing that was compared beats under any schedule.

    Builds a graph for every packing where backwards may be split, so it is for reports, not for planning.
    """
    bounds = [packing_bound(problem, packing, bound) for packing, bound in decided.judged]
    return min([decided.lower_bound, *bounds], key=lambda bound: bound.ns)


def ordered(
    problem: Problem, packed: Packing, budget: StoppingRule, seed: int, method: str, unsplit: Assignable | None = None
) -> Decided:
    """Search an order for one packing; ``unsplit``: its graph with whole backwards, where that has been made.

    Where memory is limited, splitting any backward takes room from all: so a half of the budget goes to plans that
    split none, and the faster plan is taken.
    """
    if not problem.split_backward:
        return _searched(problem, packed, unsplit or _graph(problem, problem.layout, packed), budget, seed, method)
    if problem.capacity_bytes is None:
        return _searched(problem, packed, _graph(problem, problem.layout, packed), budget, seed, method)
    watch, lean = budget.start(), problem.whole_backwards()
    unsplit = unsplit or _graph(lean, problem.layout, packed)
    watch = watch.before(_most_tasks(problem, unsplit.graph))
    whole = _searched(lean, packed, unsplit, Until(watch, 0, 0.5), seed, method)
    try:
        graph = _graph(problem, problem.layout, packed)
    except InfeasibleError:
        return whole
    try:
        split = _searched(problem, packed, graph, Until(watch, whole.evaluations, 1.0), seed, method)
    except InfeasibleError:
        split = replace(whole, lower_bound=assignable_bound(graph), evaluations=0)
    best = min(whole, split, key=lambda made: made.ns)
    bound = min(whole.lower_bound, split.lower_bound, key=lambda bound: bound.ns)
    return replace(best, lower_bound=bound, evaluations=whole.evaluations + split.evaluations)


class Glances:
    """What parts of a batch take by themselves, in milliseconds each: one even packing with static orders.

    Parameters
    ----------
    problems : sequence of Problem
        Of every replica.
    batch : Batch
    budget : StoppingRule
        A glance is one evaluation; none is begun after the end.
    seed : int
    """

    def __init__(self, problems: Sequence[Problem], batch: Batch, budget: StoppingRule, seed: int) -> None:
        self.problems, self.batch, self.seed = problems, batch, seed
        self.meter = Meter(budget.start())

    def __call__(self, members: Sequence[int], replica: int) -> float | None:
        """Nanoseconds of the samples at these positions on a replica; infinite where they do not fit there.

        None once the budget is spent.

        Raises
        ------
        InputError
            A sample exceeds the token budget by itself.
        """
        if self.meter.left(1) == 0:
            return None
        self.meter.used += 1
        batch, problem = self.batch.part(members), self.problems[replica]
        if problem.tuning is not None and not problem.tuning.searches:
            try:
                return tuned(problem, batch, self.seed).ns
            except InfeasibleError:
                return float("inf")
        return _Packings(problem, batch, Evaluations(1), self.seed, "default").glance()


def _most_tasks(problem: Problem, graph: TaskGraph) -> int:
    """Tasks of a plan that a graph with whole backwards may lead to: lowering and proving take their time by these."""
    return graph.num_tasks + (graph.num_pairs if problem.split_backward else 0)


def _graph(problem: Problem, layout: Layout, packed: Packing) -> Assignable:
    return iteration_graph(layout, packed, problem.costs, f"iteration {packed.batch.iteration}", problem.memory)


def _searched(
    problem: Problem, packed: Packing, assignable: Assignable, budget: StoppingRule, seed: int, method: str
) -> Decided:
    best = solve_assignable(
        assignable, budget=budget, seed=seed, method=method, threads=problem.threads, params=problem.search
    )
    found = best.solution
    return Decided(packed, best.assignable.graph, found.schedule, found.timeline, found.lower_bound, found.evaluations)


@dataclass(frozen=True)
class _Packed:
    """A packing, and how it does with static orders."""

    groups: Groups
    made: Decided
    unsplit: Assignable
    """Its graph, with whole backwards."""
    expected_ns: float
    """What a search is expected to come to."""
    judging_s: float
    """Seconds that its graph and static orders took."""


class _Packings:
    """The packings of one batch, compared."""

    def __init__(self, problem: Problem, batch: Batch, budget: StoppingRule, seed: int, method: str) -> None:
        check_budget(batch, problem.model, problem.packing.token_budget)
        self.meter = Meter(budget.start())
        self.problem, self.batch, self.seed, self.method = problem, batch, seed, method
        self.params = problem.search.packings
        self.tuning = problem.tuning or TuningSpec()
        policy = problem.packing.policy if problem.tuning is None else problem.tuning.pack
        self.packing = msgspec.structs.replace(problem.packing, policy=policy)
        # Packings are compared with backwards whole, which is faster; what may be split is found for the best. So are
        # strategies chosen more thoroughly for the best alone.
        self.unsplit = replace(problem.whole_backwards(), search=problem.search.hasty())
        self.loads: Loads = cost_loads(batch, problem.model, problem.layout, problem.costs)
        self.judged: list[_Packed] = []
        self.bounds: list[tuple[Packing, LowerBound]] = []
        self.known: set[tuple[Groups, tuple[tuple[int, ...], ...]]] = set()
        self.failure: InfeasibleError | None = None

    @property
    def best_ns(self) -> float:
        """Of all packings judged so far."""
        return min((each.made.ns for each in self.judged), default=float("inf"))

    @property
    def done(self) -> bool:
        """Whether what judging may take is spent; one packing is always found."""
        return self.ends_with(0)

    def ends_with(self, number: int) -> bool:
        """Whether there is no time left to judge so many microbatches, and to search them after that."""
        if not self.judged:
            return False
        last = self.judged[-1]
        if self.meter.spent >= self.params.judging_share:
            return True
        seconds = self.meter.watch.before(_most_tasks(self.problem, last.made.graph)).seconds
        needed_s = (1 + self.params.searching) * last.judging_s * number / len(last.groups)
        return seconds is not None and self.meter.elapsed_s() + needed_s > seconds

    def decide(self) -> Decided:
        """Judge, search the best few for a while, and the best of these for what is left."""
        self.try_tuned()
        self.try_numbers()
        self.try_others()
        if not self.judged:
            assert self.failure is not None
            raise self.failure
        order = sorted(self.judged, key=lambda each: each.expected_ns)
        near = self.params.near * order[0].expected_ns
        finalists = [each for each in order[: self.params.finalists] if each.expected_ns <= near]
        self.meter.watch = self.meter.watch.before(
            max(_most_tasks(self.problem, each.made.graph) for each in finalists)
        )
        best, chosen = min((each.made for each in self.judged), key=lambda made: made.ns), finalists[0]
        begin, count = self.meter.spent, len(finalists)
        while count > 1 and not self.has_time(finalists[:count], begin):
            count -= 1
        if count > 1:
            tried: list[Decided] = []
            for i, each in enumerate(finalists[:count], 1):
                until = begin + (1 - begin) * self.params.finalists_share * i / count
                tried.append(self.search(each, until))
            chosen = finalists[min(range(count), key=lambda i: tried[i].ns)]
            best = min(best, *tried, key=lambda made: made.ns)
        best = min(best, self.search(chosen, 1.0), key=lambda made: made.ns)
        # What was judged has whole backwards only.
        bound = packing_bound(self.problem, best.packing, best.lower_bound)
        return replace(best, lower_bound=bound, evaluations=self.meter.used, judged=tuple(self.bounds))

    def has_time(self, finalists: Sequence[_Packed], begin: float) -> bool:
        """Whether each can be searched for long enough in the part of the budget that they share."""
        seconds = self.meter.watch.seconds
        if seconds is None:
            return True
        each_s = seconds * (1 - begin) * self.params.finalists_share / len(finalists)
        return all(each_s >= self.params.searching * each.judging_s for each in finalists)

    def search(self, packed: _Packed, until: float) -> Decided:
        """Search orders of a packing until a part of the budget is spent."""
        if self.meter.left(1, until) == 0 or self.meter.spent >= until:
            return packed.made
        rest = Until(self.meter.watch, self.meter.used, until)
        found = ordered(self.problem, packed.made.packing, rest, self.seed, self.method, packed.unsplit)
        self.meter.used += found.evaluations
        return found

    def try_tuned(self) -> None:
        """Where encoders lie whole on the first rank, PipeTune's recurrence tells of thousands of packings at once."""
        if self.problem.pipeline is None:
            return
        try:
            made = tuned(self.unsplit, self.batch, self.seed)
            self.meter.used += 1
            groups = tuple(microbatch.samples for microbatch in made.packing.microbatches)
            self.is_new(groups, made.packing)
            began_s = self.meter.elapsed_s()
            assignable = _graph(self.unsplit, self.problem.layout, made.packing)
            # Its own order holds where the graph has no choice of strategies and leaves room for a computation.
            graph = assignable.graph
            timeline = simulate(graph, made.schedule)
            if within_limits(graph, made.schedule, timeline):
                plain = replace(made, graph=graph, timeline=timeline, lower_bound=assignable_bound(assignable))
                self.note(groups, plain, assignable, began_s)
            self.compare(groups, made.packing, assignable, began_s)
        except InfeasibleError as error:
            self.failure = error

    def try_numbers(self) -> None:
        """Judge packings into more and fewer microbatches: any number, from some a rank on, unless told otherwise."""
        loads, spec, iteration = self.loads, self.packing, self.batch.iteration
        if self.tuning.micro_batch == "fixed":
            self.judge(group(loads, spec, iteration), self.problem.layout)
        elif self.tuning.micro_batch == "multiples":
            for groups in multiples(loads, spec, self.tuning.unit_tokens):
                self.judge(groups, self.problem.layout)
        else:
            start = MICROBATCHES_PER_RANK * self.problem.layout.num_ranks
            walk(numbers(loads, spec), start, self.params.slower, self.params.misses, self.try_number)

    def glance(self) -> float:
        """Nanoseconds of the packing that is judged first; where that does not fit, of the smallest microbatches."""
        if not self.problem.plans_packing:
            self.judge(group(self.loads, self.packing, self.batch.iteration), self.problem.layout)
            return self.best_ns
        for number in (MICROBATCHES_PER_RANK * self.problem.layout.num_ranks, len(self.loads)):
            groups = even_groups(self.loads, self.packing, min(number, len(self.loads)), self.batch.iteration)
            self.judge(groups, self.problem.layout)
            if self.judged:
                break
        return self.best_ns

    def try_number(self, number: int) -> float | None:
        """Judge an even packing into so many microbatches; None: that is enough."""
        if self.ends_with(number):
            return None
        return self.judge(even_groups(self.loads, self.packing, number, self.batch.iteration), self.problem.layout)

    def try_others(self) -> None:
        """Judge packings of other kinds: full microbatches with a light rest, and other sub-microbatches."""
        if self.tuning.micro_batch == "any":
            for groups in filled_groups(self.loads, self.packing):
                if self.done:
                    return
                self.judge(groups, self.problem.layout)
        if not self.judged:
            return
        best = min(self.judged, key=lambda each: each.expected_ns)
        for layout in cut_layouts(self.problem.layout):
            if self.done:
                return
            self.judge(best.groups, layout)

    def judge(self, groups: Groups, cut: Layout) -> float:
        """Nanoseconds that a packing is expected to take; infinite where it does not fit or cannot be best."""
        packed = packing_of(self.batch, self.problem.model, cut, groups)
        if not self.is_new(groups, packed):
            return float("inf")
        began_s = self.meter.elapsed_s()
        try:
            return self.compare(groups, packed, _graph(self.unsplit, self.problem.layout, packed), began_s)
        except InfeasibleError as error:
            self.failure = error
            return float("inf")

    def is_new(self, groups: Groups, packed: Packing) -> bool:
        """Whether a packing was not judged before; it is known from now on."""
        key = groups, tuple(tuple(map(len, microbatch.parts)) for microbatch in packed.microbatches)
        new = key not in self.known
        self.known.add(key)
        return new

    def compare(self, groups: Groups, packed: Packing, assignable: Assignable, began_s: float) -> float:
        """Nanoseconds that a graph is expected to take; infinite where it cannot be best."""
        bound = assignable_bound(assignable)
        if self.judged and bound.ns >= self.best_ns:
            self.bounds.append((packed, bound))
            return float("inf")
        few = Evaluations(self.params.static_orders)
        made = _searched(self.unsplit, packed, assignable, few, self.seed, self.method)
        self.meter.used += made.evaluations
        return self.note(groups, made, assignable, began_s)

    def note(self, groups: Groups, made: Decided, assignable: Assignable, began_s: float) -> float:
        """Keep a packing, and say what it is expected to take.

        Of two that take the same with static orders, the one that is further from its bound has more to find.
        """
        expected_ns = made.ns - self.params.closing * (made.ns - made.lower_bound.ns)
        self.bounds.append((made.packing, made.lower_bound))
        self.judged.append(_Packed(groups, made, assignable, expected_ns, self.meter.elapsed_s() - began_s))
        return expected_ns
