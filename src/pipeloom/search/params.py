"""Parameters of the search: everything that tunes it, in one place.

The defaults were found by trial on the instance library (`docs/notes/search.md`). A file has a table for each group and
names only what it changes::

    [orders]
    heat = 0.2

    [strategies]
    rounds = 60

`pipeloom.io.read_spec` reads it as `SearchParams`.
"""

from __future__ import annotations

import msgspec

from pipeloom.bounds import Count, Factor, Magnitude, Number, Ratio, Share, Wait
from pipeloom.errors import InputError, check_count, check_not_negative, check_positive, check_ratio, check_share
from pipeloom.search.rule import OrderRule


class StaticOrderParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Orders by rules, which every search begins with."""

    share: Share = 0.25
    """Part of the budget that large graphs may spend on them; the promising ones come early."""
    late_parts: tuple[Share, ...] = (0.02, 0.03, 0.015, 0.025, 0.01, 0.05, 1.0)
    """Parts of all work that backwards which nothing waits for may leave for the end."""
    unequal: Ratio = 1.3
    """Passes of one group whose work differs by more than this get priorities of their own."""

    def __post_init__(self) -> None:
        """Refuse what is no share or ratio."""
        check_share("static_orders.share", self.share)
        check_ratio("static_orders.unequal", self.unequal)
        for i, part in enumerate(self.late_parts):
            check_share(f"static_orders.late_parts[{i}]", part)


class OrderParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Local search and annealing on the order of groups."""

    heat: Magnitude = 0.1
    """Start of an annealing, in mean durations of a task; so much for `few_changes` per component or fewer."""
    few_changes: Factor = 25.0
    """Beyond, the heat rises with the root of the changes per component. They are counted at the speed of the static
    orders, which is two to five times slower."""
    most_heat: Magnitude = 1.0
    """Where that rise ends."""
    far: Ratio = 1.05
    """Above so many times the bound, microbatches must change places, at which this search is better than
    justification."""
    far_share: Share = 0.1
    """Part of the time that then goes to it."""
    switch_every: Number = 64
    """One change in so many is of the policy; 0: none."""
    whole_microbatches: Number = 13
    """Of sixteen changes to the order, so many move whole microbatches."""
    steps_per_round: Count = 400_000
    """Tasks that a kernel may schedule before it returns to look at the clock: about 10 ms."""

    def __post_init__(self) -> None:
        """Refuse temperatures, shares and counts that are none."""
        check_not_negative("orders.heat", self.heat)
        check_positive("orders.few_changes", self.few_changes)
        check_not_negative("orders.most_heat", self.most_heat)
        check_ratio("orders.far", self.far)
        check_share("orders.far_share", self.far_share)
        check_not_negative("orders.switch_every", self.switch_every)
        if not 0 <= self.whole_microbatches <= 16:
            raise InputError("orders.whole_microbatches", f"{self.whole_microbatches} is not from 0 to 16")
        check_count("orders.steps_per_round", self.steps_per_round)

    def long_heat(self, changes_per_component: float) -> float:
        """Start of an annealing, in mean durations of a task: the longer it may last, the hotter."""
        return float(min(self.most_heat, self.heat * max(1.0, changes_per_component / self.few_changes) ** 0.5))


class TabuParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tabu search on the order of tasks, for small graphs and where memory is limited."""

    most_tasks: Number = 200
    """Tasks up to which a graph is small."""
    small_orders_share: Share = 0.1
    """Part of the time of small graphs for the local search of orders before."""
    one_way_orders_share: Share = 0.7
    """The same where memory is limited and time cannot be reversed."""
    tenure: Count = 10
    """What a move changed stays for so many moves, and up to twice so many."""
    patience: Factor = 45.0
    """Times the root of the number of tasks in the window: moves without anything better after which starts are
    shifted, or another window is opened."""
    window: Factor = 75.0
    """Times the root of the number of ranks: tasks of a window, of graphs that are not small. No more move at once."""
    sweeps: Count = 20
    """Patience is that only once windows have been everywhere so often; it begins with so small a part of it."""
    reach: Count = 32
    """Tasks that a move may pass, at most."""
    shifts: Count = 4
    """Up to so many shifts, one after the other, where all tasks are in one window."""
    lookahead: Count = 4
    """As in `JustificationParams`, after a shift."""
    heat: Magnitude = 0.2
    """What was found since the last shift, or in a window, is the next one's start if it is longer by no more than so
    many mean durations of a task, times an exponential variate; falling to nothing."""

    def __post_init__(self) -> None:
        """Refuse shares and counts that are none."""
        check_not_negative("tabu.most_tasks", self.most_tasks)
        check_share("tabu.small_orders_share", self.small_orders_share)
        check_share("tabu.one_way_orders_share", self.one_way_orders_share)
        check_positive("tabu.patience", self.patience)
        check_positive("tabu.window", self.window)
        for name in ("tenure", "sweeps", "reach", "shifts", "lookahead"):
            check_count(f"tabu.{name}", getattr(self, name))
        check_not_negative("tabu.heat", self.heat)


class JustificationParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Local search that schedules back and forth in time, where memory is limited."""

    share: Share = 0.5
    """Part of the time that is left for it and the tabu search after it."""
    heat: Magnitude = 0.1
    """Start of the annealing, in mean durations of a task."""
    passes: Count = 8
    """Passes over one changed schedule, at most."""
    loose: Magnitude = 1 / 32
    """A pass that comes out longer than the current schedule by more than this part ends them."""
    lookahead: Count = 4
    """Up to so many ready tasks may be refused memory before a rank waits; drawn anew for every change."""

    def __post_init__(self) -> None:
        """Refuse temperatures and counts that are none."""
        check_share("justification.share", self.share)
        check_not_negative("justification.heat", self.heat)
        check_count("justification.passes", self.passes)
        check_not_negative("justification.loose", self.loose)
        check_count("justification.lookahead", self.lookahead)


class SampleParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Search of large graphs on a sample, where memory is limited."""

    most_tasks: Number = 40_000
    """Tasks up to which a graph is searched as a whole."""
    tasks: Count = 16_000
    """Of the sample, about."""
    most_filling: Ratio = 1.02
    """The bounds of all copies of the sample, one after the other, may be so many times that of the whole."""
    share: Share = 0.6
    """Part of the time that is left when it begins; the rest is for the whole."""

    def __post_init__(self) -> None:
        """Refuse shares and counts that are none."""
        check_not_negative("sample.most_tasks", self.most_tasks)
        check_count("sample.tasks", self.tasks)
        check_ratio("sample.most_filling", self.most_filling)
        check_share("sample.share", self.share)


class TurnParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Orders and memory strategies by turns, where pairs have candidates."""

    lean_rounds: Count = 6
    """Turns from the leanest candidates."""
    uniform_rounds: Count = 3
    """Turns from the best uniform setting."""
    chosen_rounds: Count = 2
    """Turns from strategies chosen for a lean order."""
    probe_share: Share = 0.05
    """Part of the budget for the static orders of one uniform setting."""
    far: Ratio = 1.05
    """Makespan over bound beyond which an order for the leanest candidates is tried beside that for a uniform
    setting."""
    split_share: Share = 0.25
    """Part of the budget in which another number of split microbatches is begun."""

    def __post_init__(self) -> None:
        """Refuse shares, ratios and counts that are none."""
        check_count("turns.lean_rounds", self.lean_rounds)
        check_count("turns.uniform_rounds", self.uniform_rounds)
        check_count("turns.chosen_rounds", self.chosen_rounds)
        check_share("turns.probe_share", self.probe_share)
        check_ratio("turns.far", self.far)
        check_share("turns.split_share", self.split_share)


class StrategyParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The choice of memory strategies for an order, by a Lagrangian method."""

    rounds: Count = 120
    """Where one order gets strategies; twice so many once capacities are tightened."""
    large_rounds: Count = 60
    """The same for large graphs."""
    rollout_rounds: Count = 16
    """Where thousands of orders get them, and where time is short."""
    large_tasks: Number = 900
    """Tasks of a rank beyond which a graph is large. Without this limit a choice takes half a second and more for a
    rank of 1500 tasks, and no search could stop it."""
    most_share: Share = 0.1
    """Part of the budget's time that one choice may take if a less thorough one would do."""
    cost: Factor = 150.0
    """What a choice of `rounds` takes, in choices of `rollout_rounds` (graphs of 6000 to 11 500 tasks: 100 to 300).
    What costs most are the exchanges, for little: makespans differ by a part in a thousand."""
    large_cost: Factor = 2.5
    """The same for `large_rounds` (2.2 to 2.6)."""
    quick_cost: Factor = 80.0
    """What a choice of `rollout_rounds` takes, in static orders of the same graph, until one has been timed (graphs of
    9400 to 13 400 tasks: 40 to 160)."""
    thorough_rounds: Count = 64
    """Rounds from which on capacities are tightened, and the choice ends with exchanges."""
    repair_every: Count = 8
    """Rounds between two repairs of the Lagrangian's choice."""
    first_step: Factor = 1.0
    """First step of the multipliers, in the length that would close the gap if the bound were linear."""
    later_step: Factor = 0.3
    """The same once capacities are tightened."""
    most_sums: Count = 4000
    """Different sums of candidates at one place; where there are more, its capacity is not tightened."""
    most_sum_steps: Number = 300_000
    """Steps of merging sums, over all places of a rank: about a millisecond."""

    def __post_init__(self) -> None:
        """Refuse shares, steps and counts that are none."""
        for name in ("rounds", "large_rounds", "rollout_rounds", "thorough_rounds", "repair_every", "most_sums"):
            check_count(f"strategies.{name}", getattr(self, name))
        for name in ("cost", "large_cost", "quick_cost", "first_step", "later_step"):
            check_positive(f"strategies.{name}", getattr(self, name))
        for name in ("large_tasks", "most_sum_steps"):
            check_not_negative(f"strategies.{name}", getattr(self, name))
        check_share("strategies.most_share", self.most_share)


class AssignmentParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The choice of ranks for the parts of replicated modules."""

    first_share: Share = 0.35
    """Part of the budget after which orders under the assignment at hand have been searched."""
    even_share: Share = 0.6
    """After which orders under an assignment that is even under the strategies found have been searched, too; the rest
    is for the annealing of assignment and order."""
    most_swaps: Number = 400
    """Changes that make an assignment even."""
    heat: Magnitude = 0.03
    """Start of the annealing, in mean durations of a task; it falls to nothing."""
    rounds: Count = 4
    """Turns of annealing and of the choice of strategies, where there are any."""
    least_evaluations: Number = 20
    """Budgets of fewer schedules go to one assignment."""

    def __post_init__(self) -> None:
        """Refuse temperatures, shares and counts that are none."""
        check_share("assignment.first_share", self.first_share)
        check_share("assignment.even_share", self.even_share)
        if self.even_share < self.first_share:
            raise InputError(
                "assignment.even_share", f"{self.even_share:g} is before first_share, {self.first_share:g}", "raise it"
            )
        check_not_negative("assignment.most_swaps", self.most_swaps)
        check_not_negative("assignment.heat", self.heat)
        check_count("assignment.rounds", self.rounds)
        check_not_negative("assignment.least_evaluations", self.least_evaluations)


class FeasibilityParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long to look for any order or choice of candidates that fits, where the plain ones do not."""

    job_states: Number = 20_000
    """Sets of finished tasks that are tried for a component."""
    candidate_states: Number = 20_000
    """Sets of finished tasks, with candidates, that are tried for a component."""

    def __post_init__(self) -> None:
        """Refuse negative counts."""
        check_not_negative("feasibility.job_states", self.job_states)
        check_not_negative("feasibility.candidate_states", self.candidate_states)


class PackingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The choice among packings of one batch, where it is planned together with the order."""

    static_orders: Count = 4
    """Orders by which a packing is judged."""
    closing: Share = 0.5
    """Part of the way from there to its bound that a search is expected to go; where it ends is compared."""
    slower: Ratio = 1.01
    """A packing that much slower than the best is a miss."""
    misses: Count = 2
    """So many, one after the other, end the row of more microbatches, or of fewer."""
    judging_share: Share = 0.5
    """Part of the budget in which another packing is begun to be judged."""
    searching: Ratio = 3.0
    """A search gets at least so many times what judging its packing took; for that, fewer are judged and searched."""
    near: Ratio = 1.06
    """Packings within so many times the best's seconds are searched, too,"""
    finalists: Count = 3
    """but no more of them than this, for"""
    finalists_share: Share = 0.5
    """so large a part of what is left; the rest is for the best of them."""
    dealing_share: Share = 0.25
    """Part of the budget in which the batch after the next is dealt to replicas."""

    def __post_init__(self) -> None:
        """Refuse shares, ratios and counts that are none."""
        for name in ("static_orders", "misses", "finalists"):
            check_count(f"packings.{name}", getattr(self, name))
        for name in ("slower", "searching", "near"):
            check_ratio(f"packings.{name}", getattr(self, name))
        for name in ("closing", "judging_share", "finalists_share", "dealing_share"):
            check_share(f"packings.{name}", getattr(self, name))


class ExactParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Exact solvers, which start from an answer of the default method."""

    start_share: Share = 0.1
    """Part of the budget that goes to that answer."""
    seconds: Wait = 10.0
    """Time for an exact solver where the budget has no deadline."""

    def __post_init__(self) -> None:
        """Refuse shares and times that are none."""
        check_share("exact.start_share", self.start_share)
        check_positive("exact.seconds", self.seconds)


class SearchParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All parameters of `pipeloom.search.solve` and `pipeloom.search.solve_assignable`."""

    static_orders: StaticOrderParams = StaticOrderParams()
    orders: OrderParams = OrderParams()
    tabu: TabuParams = TabuParams()
    justification: JustificationParams = JustificationParams()
    sample: SampleParams = SampleParams()
    turns: TurnParams = TurnParams()
    strategies: StrategyParams = StrategyParams()
    assignment: AssignmentParams = AssignmentParams()
    feasibility: FeasibilityParams = FeasibilityParams()
    packings: PackingParams = PackingParams()
    exact: ExactParams = ExactParams()
    rules: tuple[OrderRule, ...] = ()
    """Of the layout of the graphs that are searched: what they give are starts, beside those of every search."""

    def hasty(self) -> SearchParams:
        """Return the same with strategies chosen as quickly as each time an order is decoded, where many graphs are
        compared.
        """
        rounds = self.strategies.rollout_rounds
        strategies = msgspec.structs.replace(self.strategies, rounds=rounds, large_rounds=rounds)
        return msgspec.structs.replace(self, strategies=strategies)


DEFAULTS = SearchParams()
