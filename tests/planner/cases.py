"""Problems to plan, and a store in memory."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from pipeloom.cost import LayerFit, Profile
from pipeloom.layout import ModulePlacement, replicated, separate
from pipeloom.packing import PackingSpec
from pipeloom.planner import PlanningProblem
from pipeloom.spec import RankSpec
from pipeloom.taskgraph.iteration import MemoryLimit
from tests.cases import vlm_spec


class MemoryStore:
    """Keys and values of one process."""

    address, secret = "nowhere:0", ""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def peek(self, key: str) -> bytes | None:
        return self.values.get(key)

    def take(self, key: str) -> bytes | None:
        return self.values.pop(key, None)


def random_problem(seed: int, *, everywhere: bool = False) -> PlanningProblem:
    """A vision-language model on one to four ranks, with random costs; or with the encoder whole on each rank."""
    rng = random.Random(seed)
    ranks = rng.randint(1, 4)
    model = vlm_spec(ranks + rng.randint(0, 3), 2 * ranks + rng.randint(0, 3), vision_frozen=rng.random() < 0.2)

    def fit() -> LayerFit:
        return LayerFit(
            (rng.uniform(1e-5, 1e-3), 0, rng.uniform(0, 1e-4), 0),
            (rng.uniform(1e-5, 2e-3), 0, 1e-5, 0),
            (0, 0, rng.randint(1, 100), 0),
        )

    kinds = {f"{m.name}/{layer.kind}": fit() for m in model.modules for layer in m.flat_layers}
    profile = Profile("invented", kinds, typical_s={key: cost.forward_s[0] for key, cost in kinds.items()})
    placements = {"vision": ModulePlacement(1, rng.choice([1, 3, None])), "lm": ModulePlacement(2)}
    layout = separate(model, ranks, placements, profile.load)
    if everywhere:
        layout = replicated(layout, ["vision"])
    return PlanningProblem.from_profile(
        model, layout, profile, PackingSpec(rng.randint(32, 64)), budget_s=0.05, seed=seed
    )


def with_costs(problem: PlanningProblem, **changes: Any) -> PlanningProblem:
    """The problem with changed fields of its costs."""
    return replace(problem, costs=replace(problem.profile_costs, **changes))


def on_cluster(problem: PlanningProblem, cluster: RankSpec) -> PlanningProblem:
    """The problem on ranks with these links and this memory."""
    return replace(with_costs(problem, rank=cluster), memory=MemoryLimit.of(cluster))
