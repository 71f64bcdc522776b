"""All parameters of the search.

The defaults were tuned on the instance library (`docs/notes/search.md`). A file has a table for each group and contains
only the values that it changes::

    [orders]
    heat = 0.2

    [strategies]
    rounds = 60

`pipeloom.io.read_spec` reads it as `SearchParams`.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from pipeloom.bounds import Count, Factor, Magnitude, Number, Ratio, Share
from pipeloom.conversion import check_fields
from pipeloom.errors import InputError
from pipeloom.search.rule import OrderRule

FEW_CHANGES = 25.0
"""Above this number of changes per component, the annealing temperature rises with the square root of the number.
Changes are estimated at the speed of the static orders, which is two to five times slower."""


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of parameters. Its name stands in errors."""

    table: ClassVar[str]

    def __post_init__(self) -> None:
        """Raise `InputError` for values outside of the bounds of their types."""
        check_fields(self, self.table)


class StaticOrderParams(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Static orders, which start every search."""

    table: ClassVar[str] = "static_orders"
    share: Share = 0.25
    """Fraction of the budget that large graphs may spend on static orders. The most promising orders are tried
    first."""
    late_parts: tuple[Share, ...] = (0.02, 0.03, 0.015, 0.025, 0.01, 0.05, 1.0)
    """Fractions of all work that may be left for the end by backwards on which no other task depends."""


class OrderParams(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Local search and annealing on the order of groups."""

    table: ClassVar[str] = "orders"
    heat: Magnitude = 0.1
    """Initial annealing temperature, in mean task durations, for `FEW_CHANGES` per component or fewer."""
    most_heat: Magnitude = 1.0
    """Maximum initial temperature, in mean task durations."""
    far: Ratio = 1.05
    """Above this multiple of the lower bound, microbatches must change places. Group orders then get `far_share` of the
    time, since they do this better than justification."""
    far_share: Share = 0.1
    """Fraction of the time for group orders above `far`."""

    def long_heat(self, changes_per_component: float) -> float:
        """Return the initial annealing temperature, in mean task durations. Longer annealing starts hotter."""
        return float(min(self.most_heat, self.heat * max(1.0, changes_per_component / FEW_CHANGES) ** 0.5))


class TabuParams(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tabu search on the order of tasks, for small graphs and for limited memory."""

    table: ClassVar[str] = "tabu"
    most_tasks: Number = 200
    """Maximum number of tasks of a small graph."""
    small_orders_share: Share = 0.1
    """Fraction of the time of small graphs for the preceding local search of orders."""
    one_way_orders_share: Share = 0.7
    """The same fraction if memory is limited and time cannot be reversed."""
    tenure: Count = 10
    """Number of moves for which a change is kept, drawn from this number up to twice this number."""
    patience: Factor = 45.0
    """Multiple of the square root of the number of tasks in the window. After this many moves without improvement,
    starts are shifted or another window is opened."""
    window: Factor = 75.0
    """Multiple of the square root of the number of ranks: the number of tasks in a window, for graphs that are not
    small. Only tasks in the window move."""
    reach: Count = 32
    """Maximum number of tasks that a move may pass."""
    heat: Magnitude = 0.2
    """Threshold for accepting the result of a shift or window as the next start: it may be longer by this many mean
    task durations, times an exponential variate. The threshold falls to 0."""


class JustificationParams(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Local search by scheduling in both directions of time, for limited memory."""

    table: ClassVar[str] = "justification"
    share: Share = 0.5
    """Fraction of the remaining time for justification and the tabu search that follows."""
    heat: Magnitude = 0.1
    """Initial annealing temperature, in mean task durations."""
    passes: Count = 8
    """Maximum number of passes over one perturbed schedule."""
    lookahead: Count = 4
    """Maximum number of ready tasks that may lack memory before a rank waits. It is drawn for each perturbation."""


class SampleParams(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Search of large graphs on a sample, for limited memory."""

    table: ClassVar[str] = "sample"
    most_tasks: Number = 40_000
    """Maximum number of tasks of a graph that is searched as a whole."""
    tasks: Count = 16_000
    """Approximate number of tasks in the sample."""
    most_filling: Ratio = 1.02
    """Maximum ratio of the summed bounds of all copies of the sample to the bound of the whole graph."""
    share: Share = 0.6
    """Fraction of the remaining time for the sample. The rest is for the whole graph."""


class TurnParams(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Alternating search of orders and memory strategies, for pairs with candidates."""

    table: ClassVar[str] = "turns"
    lean_rounds: Count = 6
    """Number of turns from the minimum-memory candidates."""
    uniform_rounds: Count = 3
    """Number of turns from the best uniform setting."""
    chosen_rounds: Count = 2
    """Number of turns from strategies chosen for a minimum-memory order."""


class StrategyParams(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Choice of memory strategies for an order, by a Lagrangian method."""

    table: ClassVar[str] = "strategies"
    rounds: Count = 120
    """Number of rounds to choose strategies for one order."""
    rollout_rounds: Count = 16
    """Number of rounds when strategies are chosen for thousands of orders or time is short."""


class AssignmentParams(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Assignment of the sub-microbatches of replicated modules to ranks."""

    table: ClassVar[str] = "assignment"
    first_share: Share = 0.35
    """Fraction of the budget at which the search of orders under the initial assignment ends."""
    even_share: Share = 0.6
    """Fraction of the budget at which the search of orders under an assignment that is even under the chosen strategies
    ends. The rest is for annealing of assignment and order."""
    heat: Magnitude = 0.03
    """Initial annealing temperature, in mean task durations. It falls to 0."""
    rounds: Count = 4
    """Number of turns of annealing and strategy choice, if pairs have candidates."""

    def __post_init__(self) -> None:
        """Raise `InputError` for invalid values."""
        _Table.__post_init__(self)
        if self.even_share < self.first_share:
            raise InputError(
                "assignment.even_share", f"{self.even_share:g} is before first_share, {self.first_share:g}", "raise it"
            )


class PackingParams(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Choice among packings of one batch, planned together with the order."""

    table: ClassVar[str] = "packings"
    misses: Count = 2
    """The search for more microbatches, or for fewer, stops after this many consecutive misses."""
    searching: Ratio = 3.0
    """Minimum time of a search, as a multiple of the time to judge its packing. Fewer packings are judged and searched
    to allow this."""
    finalists: Count = 3
    """Maximum number of packings that are searched."""
    dealing_share: Share = 0.25
    """Fraction of the budget in which samples of the batch after the next are assigned to replicas."""


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
    packings: PackingParams = PackingParams()
    rules: tuple[OrderRule, ...] = ()
    """Priority rules found with the layout. Their schedules are additional starts."""

    def fast(self) -> SearchParams:
        """Return a copy that chooses strategies with few rounds, to compare many graphs."""
        strategies = msgspec.structs.replace(self.strategies, rounds=self.strategies.rollout_rounds)
        return msgspec.structs.replace(self, strategies=strategies)


DEFAULTS = SearchParams()
