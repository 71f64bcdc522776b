"""Training under a cap on memory, as one rank: what was planned, what was recomputed, and what was really held."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from pipeloom.layout import ModulePlacement
from pipeloom.packing import PackingSpec
from pipeloom.planner import HostedStore, Planner, PlanningProblem
from pipeloom.runtime import ExecutionOptions, ProfileOptions, StepReport, TcpPlanStore, Trainer, profile_model
from tests.planner.cases import with_costs
from tests.runtime.test_counts import Live
from tests.runtime.training import (
    CLIP,
    DOCUMENTS,
    Meddling,
    data,
    invented_problem,
    losses_undivided,
    model,
    optimizer,
    task,
)

ITERATIONS, SEED = 2, 3
# Weights, and the moments of an optimiser, are there outside iterations too; gradients are made inside.
_OUTSIDE_COPIES = 3


class Peak(Live):
    """The most that lived at the end of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.made = {key: made for key, made in self.made.items() if not made[0].expired()}
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        return result


class Capped(NamedTuple):
    """What one training came to on one rank."""

    losses: list[float]
    peaks: list[int]
    """Bytes really held, weights and moments included."""
    recomputed: int
    fresh: list[bool]
    strategies: list[str]
    """Of every forward of this rank."""
    halves: int
    """Backwards of this rank that were split."""


def measured_problem(num_ranks: int) -> PlanningProblem:
    """The digits model measured on this machine, all strategies included."""
    made, batches = invented_problem(num_ranks), list(data.batches(SEED, 2, DOCUMENTS))
    profile = profile_model(
        model(),
        batches,
        describe=task.describe,
        packing=PackingSpec(120),
        placements={"vision": ModulePlacement(1, 4)},
        options=ProfileOptions(repeats=1, strategies=True),
    )
    return replace(with_costs(made, profile=profile), packing=PackingSpec(120, "balanced"))


def capped_trainings(problems: list[PlanningProblem], waits: list[bool]) -> list[Capped]:
    """One training after the other, each with its own problem; without waiting, all run on fallback plans."""
    # The first operations under such a mode make torch import much, which makes tensors of its own.
    with Peak():
        losses_undivided(1)
    return [train(problem, wait) for problem, wait in zip(problems, waits, strict=True)]


def train(problem: PlanningProblem, waits: bool) -> Capped:
    seconds = 120.0 if waits else 0.0

    def store() -> HostedStore:
        # Without waiting, a plan may still be there in time.
        return TcpPlanStore.host() if waits else Meddling(TcpPlanStore.host(), lambda iteration, data: None)

    planner = Planner(problem, store, deadline_s=seconds, start_timeout_s=seconds)
    trainer = Trainer(
        model(),
        problem.layout,
        planner,
        describe=task.describe,
        optimizer=optimizer,
        options=ExecutionOptions(clip_norm=CLIP),
    )
    executor = trainer._executor
    outside = _OUTSIDE_COPIES * sum(p.nbytes for _, p in executor.named_parameters())
    found = Capped([], [], 0, [], [], 0)
    recomputed = halves = 0
    run = executor.run

    def watched(plan: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal recomputed, halves
        with Peak() as live:
            result = run(plan, *args, **kwargs)
        found.peaks.append(outside + live.peak_bytes)
        recomputed += result.num_recomputed
        found.strategies.extend(action.strategy for action in plan.actions if action.verb == "F")
        halves += sum(action.verb == "W" for action in plan.actions)
        return result

    executor.run = watched  # type: ignore[method-assign]
    report: StepReport
    for report in trainer.run(data.batches(SEED, ITERATIONS, DOCUMENTS)):
        found.losses.append(report.loss)
        found.fresh.append(report.fresh)
    assert torch.isfinite(torch.tensor(found.losses)).all()
    return found._replace(recomputed=recomputed, halves=halves)
