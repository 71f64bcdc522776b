"""How long planning an iteration takes, from its samples to a plan that is proved."""

from __future__ import annotations

import time
from dataclasses import dataclass

from pipeloom.collector import collector_paused
from pipeloom.errors import InfeasibleError
from pipeloom.plan import boundary_shapes, lower, verify
from pipeloom.planner import FinishingTime
from pipeloom_lab.reproduce.dip import runs
from pipeloom_lab.reproduce.dip.setups import LARGE, SETUPS, PaperSetup, device, mean
from pipeloom_lab.reproduce.part import Options, Outcome
from pipeloom_lab.reproduce.texts import make_table


def planning_time(options: Options) -> Outcome:
    """Processor time of planning one iteration, everything included, against the iteration that it hides behind."""
    rows, finishing = [], FinishingTime()
    for label, setup in {**SETUPS, **LARGE}.items():
        most = runs.planning_s(runs.OURS, options.search_s)
        numbers = runs.iterations(options, 1)
        found = [
            planned(setup, *each, options, finishing) for each in (numbers[:1] if setup in LARGE.values() else numbers)
        ]
        each = [one for one in found if one is not None]
        if not each:
            rows.append((label, "", "", "", f"{most:g}", "out of memory", "", ""))
            continue
        found_s, after = (mean(one.spent_s[i] for one in each) for i in range(2))
        rows.append(
            (
                label,
                str(each[0].num_tasks),
                f"{found_s:.2f}",
                f"{after:.2f}",
                f"{most:g}",
                f"{found_s + after:.2f}",
                f"{mean(one.seconds for one in each):.1f}",
                f"{mean(one.gap for one in each) * 100:.1f} %",
            )
        )
    return Outcome(
        (make_table("dip/planning", rows, rule=runs.rule(options)),), devices=device(*SETUPS.values(), *LARGE.values())
    )


@dataclass(frozen=True, slots=True)
class PlannedIteration:
    """Processor seconds up to the end of the search, and after it; what it found."""

    spent_s: tuple[float, float]
    num_tasks: int
    seconds: float
    gap: float


@collector_paused()
def planned(
    setup: PaperSetup, seed: int, number: int, options: Options, finishing: FinishingTime
) -> PlannedIteration | None:
    """Plan an iteration under our layout, from its samples to a plan that is proved; None: it does not fit.

    ``finishing`` is what plan and proof took the last time, as the planner keeps it from batch to batch.

    Without the collector, which here would look over all the iterations that the evaluation keeps; the planner's own
    process has taken what it keeps out of the collector's sight (`pipeloom.planner.service`).
    """
    setting, groups = setup.setting, setup.groups(seed, number)
    try:
        one = runs.system(setup, runs.OURS)
        begin = time.process_time()
        budget = runs.budget_of(runs.OURS, options.search_s, finishing)
        found = one.run(groups, budget, seed)
    except InfeasibleError:
        return None
    searched = time.process_time()
    layout, packing = found.layout, found.packing
    assert packing is not None
    plan = lower(found.graph, found.schedule, found.timeline, layout, packing, boundary_shapes(setting.model, layout))
    verify(plan, layout, packing)
    after = time.process_time() - searched
    finishing.took(after, found.graph.num_tasks)
    gap = found.timeline.makespan_ns / max(found.lower_bound.ns, 1) - 1
    return PlannedIteration((searched - begin, after), found.graph.num_tasks, found.iteration_s, gap)
