"""The runtime trains a language model under arranged layouts, with the gradients of the undivided model."""

from __future__ import annotations

import random

import pytest

from pipeloom.layout.cooptimize import (
    PartitionPlacement,
    PriorityRule,
    chain_of_layers,
    cooptimize,
    layout_of,
    schedule_of,
)
from pipeloom.layout.cooptimize.starts import natural_keys
from pipeloom.packing.pack import PackingSpec, pack
from pipeloom.plan import verify
from pipeloom.search import Budget
from pipeloom.spec import LayerSpec, ModelSpec, ModuleSpec, TensorShape
from pipeloom.timeline import simulate
from tests.layout.cooptimize.chains import table
from tests.plan.cases import DTYPE, WIDTH, Case, random_batch
from tests.runtime.cases import (
    Run,
    assert_equal_gradients,
    expected,
    random_documents,
    real_model,
    run_threads,
    take_gradients,
    total_loss,
)

LAYERS, RANKS = 8, 3
BY_HAND = (
    PartitionPlacement((0, 1, 2, 4, 5, 8), (0, 0, 2, 2, 1)),  # adjacent chunks on one rank
    PartitionPlacement((0, 2, 3, 6, 8), (2, 0, 2, 1)),
    PartitionPlacement((0, 3, 8), (1, 1)),  # ranks without layers
)


def run_of(seed: int, placement: PartitionPlacement | None) -> Run:
    """A chain model with random weights and texts, arranged by hand or by the search."""
    rng = random.Random(f"arranged {seed}")
    layers = tuple(LayerSpec(f"lm{i}", TensorShape(("tokens", WIDTH), DTYPE)) for i in range(LAYERS))
    spec = ModelSpec("chain", (ModuleSpec(name="lm", reads="sequence", layers=layers),))
    batch = random_batch(rng)
    budget = PackingSpec(token_budget=25)
    whole = layout_of(RANKS, PartitionPlacement((0, LAYERS), (0,)))
    num = len(pack(batch, spec, whole, budget).microbatches)
    chain = chain_of_layers(table(seed, LAYERS, RANKS, num), split=True)
    if placement is None:
        found = cooptimize(chain, budget=Budget(evaluations=300), seed=seed)
        placement, graph, schedule = found.placement, found.graph, found.schedule
    else:
        keys = natural_keys(chain, placement, 1000, 1.0)
        graph, schedule = schedule_of(chain, placement, PriorityRule(keys, keys * 0, 2))
    layout = layout_of(RANKS, placement)
    case = Case(spec, layout, pack(batch, spec, layout, budget), graph, schedule, simulate(graph, schedule))
    return Run(case, real_model(rng, spec), random_documents(rng, batch))


@pytest.mark.parametrize("placement", [*BY_HAND, None])
@pytest.mark.parametrize("seed", [0, 1])
def test_gradients_are_those_of_the_undivided_model(placement: PartitionPlacement | None, seed: int) -> None:
    run = run_of(seed, placement)
    verify(run.case.plan, run.case.layout, run.case.packing)
    loss, wanted = expected(run)
    results = run_threads(run, order="in order")
    assert abs(total_loss(results) - loss) < 1e-10 * (1 + abs(loss))
    assert_equal_gradients(take_gradients(run.model), wanted)
