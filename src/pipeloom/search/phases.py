"""The default search as a list of phases. Each phase has a duration and a condition.

Phases run from first to last. If a phase does not apply to a graph, the next phase gets its time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeloom.search.budget import Stretch
from pipeloom.search.justify import justify
from pipeloom.search.kernels import codes
from pipeloom.search.local import local_search, portfolio
from pipeloom.search.params import SearchParams
from pipeloom.search.sample import search_sample
from pipeloom.search.state import Run, Search
from pipeloom.search.tabu import tabu_search


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a search.

    Attributes
    ----------
    share : float
        Fraction of the time that remains when the phase begins.
    where : callable
        Return whether the phase applies to a search. Called just before the phase would begin.
    open_end : bool
        Whether the phase may end early. The next phase then begins at that time, not at the end of the share.
    """

    name: str
    run: Run
    share: float = 1.0
    where: Callable[[Search], bool] = lambda _search: True
    open_end: bool = False


def default_phases(params: SearchParams) -> tuple[Phase, ...]:
    """Return the phases of the default search.

    - Every search begins with static orders.
    - Small graphs continue with annealing of orders and tabu search on the order of tasks.
    - If memory does not matter, local search improves the orders.
    - If memory matters, orders far from the bound are annealed, and orders near it are improved by justification. Tabu
      search follows. Large graphs far from the bound are first searched on a sample.
    """
    orders, tasks, back, sample = params.orders, params.tabu, params.justification, params.sample

    def small(search: Search) -> bool:
        return search.graph.num_tasks <= tasks.most_tasks

    def unlimited(search: Search) -> bool:
        return not small(search) and not search.limited and not search.listed

    def limited(search: Search) -> bool:
        # If a list of tasks is better than all group orders, tabu search improves the list.
        return not small(search) and (search.limited or search.listed)

    def large(search: Search) -> bool:
        return limited(search) and search.graph.num_tasks > sample.most_tasks

    def on_a_sample(search: Search, stretch: Stretch) -> None:
        search_sample(search, stretch, default)

    def far(search: Search) -> bool:
        return limited(search) and search.best_ns > orders.far * search.target_ns

    def near(search: Search) -> bool:
        # One pass over a whole large graph takes too long for a single step.
        return limited(search) and not far(search) and not large(search) and search.reverse is not None

    def one_way(search: Search) -> bool:
        return limited(search) and not large(search) and search.reverse is None

    def anneal(search: Search, stretch: Stretch) -> None:
        local_search(search, stretch, orders.heat)

    def anneal_long(search: Search, stretch: Stretch) -> None:
        pace = search.pace
        changes = search.meter.expected(pace.evaluations, pace.seconds, stretch.until - stretch.since)
        local_search(search, stretch, orders.long_heat(changes / len(search.packed.component_size)))

    def back_and_forth(search: Search, stretch: Stretch) -> None:
        justify(search, stretch, back.heat)

    return (
        Phase("static orders", portfolio, share=params.static_orders.share, open_end=True),
        Phase("orders, annealed", anneal, share=tasks.small_orders_share, where=small),
        Phase("orders, improved", local_search, where=unlimited),
        Phase(
            "sample", on_a_sample, share=sample.share, where=lambda search: large(search) and far(search), open_end=True
        ),
        # Far from the bound, microbatches must change places. Search of group orders does this best.
        Phase("orders, annealed the hotter the longer", anneal_long, share=orders.far_share, where=far),
        Phase("justification", back_and_forth, share=back.share, where=near),
        Phase("orders, annealed", anneal, share=tasks.one_way_orders_share, where=one_way),
        Phase("tabu search of tasks", tabu_search, where=lambda search: not unlimited(search)),
    )


def default(search: Search, stretch: Stretch) -> None:
    """Run the default phases in the remainder of a part of the budget."""
    begin = search.meter.spent
    for phase in default_phases(search.params):
        # The condition of a phase may be expensive, so it is not evaluated after the end of the budget.
        if search.done or (search.ordered.ns < codes.NEVER and search.meter.spent >= 1):
            return
        if not phase.where(search):
            continue
        mine = Stretch(begin, stretch.until).first(phase.share)
        phase.run(search, mine)
        begin = search.meter.spent if phase.open_end else mine.until
