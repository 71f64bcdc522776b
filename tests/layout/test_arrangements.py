"""Arrangements of several modules, frozen ones among them, with all that training offers; and what they may take."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from pipeloom.cost import LayerFit, Profile, ProfileCosts, StrategyFit
from pipeloom.cost.layers import LayerCost, LayerTable
from pipeloom.errors import InfeasibleError
from pipeloom.layout.arrangements import (
    FEWEST_EVALUATIONS,
    MOST_EVALUATIONS,
    arrangement_of,
    arrangements,
    evaluations_for,
)
from pipeloom.layout.cooptimize import LayerChain, PartitionPlacement, PriorityRule, chain_of_layers, evaluate
from pipeloom.layout.cooptimize.joint import every_walk
from pipeloom.layout.cooptimize.params import AgainParams, CooptimizeParams
from pipeloom.layout.cooptimize.rules import cut_at, order_rule
from pipeloom.layout.training import Preview, arrange_training_layout
from pipeloom.packing import PackingSpec
from pipeloom.planner.planning import plan_batch
from pipeloom.planner.problem import PlanningProblem
from pipeloom.search import Budget, SearchParams
from pipeloom.spec import Batch, Chunk, ModelSpec, Sample, Strategy
from pipeloom.taskgraph.iteration import MemoryLimit
from pipeloom.timeline import check
from tests.cases import vlm_spec
from tests.layout.cooptimize.chains import placed_chains, table

PACKING = PackingSpec(30, "balanced")
REQUIRED = [field.name for field in msgspec.structs.fields(StrategyFit) if field.required]


def costs_of(model: ModelSpec, seed: int, **more: object) -> ProfileCosts:
    """Layers whose kinds take random times, with halves and what selective recomputation keeps."""
    rng = random.Random(f"arrangements {seed}")
    fits = {}
    for module in model.modules:
        for layer in module.flat_layers:
            f, b = rng.uniform(1e-6, 9e-6), rng.uniform(2e-6, 2e-5)
            parts = StrategyFit(
                **dict.fromkeys(REQUIRED, (0.0, 0.0, 0.0, 0.0))
                | {"input_gradient_s": (0, 0, b / 2, 0), "weight_gradient_s": (0, 0, b / 2, 0)}
            )
            fits[f"{module.name}/{layer.kind}"] = LayerFit((1e-5, 0, f, 0), (2e-5, 0, b, 0), (0, 0, 64.0, 0), parts)
    return ProfileCosts(model, Profile("made", fits), **more)  # type: ignore[arg-type]


def batches(seed: int) -> list[Batch]:
    draw = random.Random(seed)
    return [
        Batch(tuple(Sample(f"{b}.{i}", 4 + draw.randrange(8), (4,) * draw.randrange(4)) for i in range(8)), b)
        for b in range(2)
    ]


@pytest.mark.parametrize("frozen", [True, pytest.param(False, marks=pytest.mark.full)])
def test_encoder_and_language_model_are_arranged_together(frozen: bool) -> None:
    """Fewer layers in the encoder than there are ranks, and still plans that verify."""
    model = vlm_spec(2, 6, vision_frozen=frozen)
    costs = costs_of(model, 1, split_backward=True, strategies=("keep", "recompute"))
    preview = Preview(costs, PACKING, batches(0)[:1], 3, capacity_bytes=200_000)
    trials = arrange_training_layout(preview, evaluations=300, trial=Budget(evaluations=4))
    for trial in trials:
        assert trial.rule is not None
        trial.rule.check_layout(trial.layout)
        assert {m.name: m.frozen for m in trial.layout.modules} == {"vision": frozen, "lm": False}
        assert [c.layers for c in trial.layout.chunks if c.module == "lm"][-1][1] == 5
    assert trials[0].seconds == min(trial.seconds for trial in trials if not trial.ruled_out)
    best = trials[0]
    memory, search = MemoryLimit(preview.capacity_bytes), SearchParams(rules=(best.rule,))
    problem = PlanningProblem(model, best.layout, costs, PACKING, memory=memory, search=search)
    made = plan_batch(problem, batches(5)[0], budget=Budget(evaluations=10))
    assert not check(made.graph, made.schedule, made.timeline)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_table_of_several_modules_adds_up(frozen: bool) -> None:
    """Encoders by what each microbatch has of them; what is frozen has no backward, holds nothing, has no choice."""
    model = vlm_spec(3, 5, vision_frozen=frozen)
    costs = costs_of(model, 2, split_backward=True, strategies=("recompute", "keep"))
    preview = Preview(costs, PACKING, batches(0), 2)
    layers = preview.layers().layers
    assert [layer.name for layer in layers[:4]] == ["vision.block.0", "vision.block.1", "vision.merge.2", "lm.block.0"]
    packed = preview.packed()
    microbatches = [each for p in packed for each in p.microbatches]
    for i, layer in enumerate(layers):
        column, number = (0, i) if i < 3 else (1, i - 3)
        chunk = Chunk(model.modules[column].name, (number, number), 0)
        each = [[costs.chunk_costs(chunk, part.workload) for part in m.parts[column]] for m in microbatches]
        assert layer.forward_s == pytest.approx(sum(o[0].forward_s for row in each for o in row) / len(each))
        if frozen and column == 0:
            assert (layer.total_backward_s, layer.activation_bytes, layer.candidates) == (0.0, 0, None)
            continue
        assert layer.candidates is not None
        assert [entry.strategy for entry in layer.candidates] == ["recompute", "keep"]
        for k, entry in enumerate(layer.candidates):
            wanted = sum(o[k].backward_input_s or 0.0 for row in each for o in row) / len(each)
            assert entry.backward_input_s == pytest.approx(wanted)
            assert entry.activation_bytes == max(sum(o[k].activation_bytes for o in row) for row in each)


def test_layouts_have_distinct_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pipeloom.layout.arrangements.arrangement_of", lambda *found: arrangement_of(*found)._replace(name="same")
    )
    layers = tuple(LayerCost(f"layer.{i}", 1e-3, 1, 0, backward_s=1e-3) for i in range(6))
    found = arrangements([LayerTable("equal", 2, 4, 0.0, 0, layers)], vlm_spec(2, 4), evaluations=200)
    assert len({draft.name for draft in found}) == len({draft.layout.chunks for draft in found}) == len(found) > 1


def test_a_module_that_has_nothing_to_do_is_laid_out_too() -> None:
    model = vlm_spec(2, 4)
    texts = [Batch(tuple(Sample(str(i), 5) for i in range(6)))]
    preview = Preview(costs_of(model, 3), PACKING, texts, 2)
    found = arrangements([preview.layers()], model, evaluations=200)
    assert all(len(draft.layout.chunks_of("vision")) >= 1 for draft in found)


def test_offering_to_offload_refuses_no_arrangement() -> None:
    """Under the least limit that others fit, there is no room for what would be on its way to the host."""
    model, limit = vlm_spec(2, 4), 2000

    def cooptimized(offered: tuple[Strategy, ...]) -> float:
        costs = costs_of(model, 1, strategies=offered)
        preview = Preview(costs, PACKING, batches(0)[:1], 2, capacity_bytes=limit)
        return arrange_training_layout(preview, evaluations=60, trial=Budget(evaluations=2))[0].seconds

    others: tuple[Strategy, ...] = ("keep", "recompute")
    while True:
        try:
            without = cooptimized(others)
            break
        except InfeasibleError:
            limit = limit * 5 // 4
    # Half of the budget goes to arrangements that offload.
    assert cooptimized((*others, "offload")) <= 1.2 * without


@settings(deadline=None, max_examples=60)
@given(placed_chains())
def test_chunks_cut_in_two_have_the_same_layers_ranks_and_keys(
    setting: tuple[LayerChain, PartitionPlacement, PriorityRule],
) -> None:
    chain, placement, rule = setting
    boundaries = {i for i in range(1, chain.num_layers) if i % 3 == 1}
    cut, under = cut_at(placement, rule, boundaries)
    assert boundaries <= set(cut.cuts)
    assert set(cut.cuts) == set(placement.cuts) | boundaries
    for layer in range(chain.num_layers):
        before, after = (np.searchsorted(p.cuts, layer, side="right") - 1 for p in (placement, cut))
        assert placement.ranks[before] == cut.ranks[after]
        assert np.array_equal(rule.keys[:, before], under.keys[:, after])
        assert np.array_equal(rule.waits[:, before], under.waits[:, after])
    assert cut_at(placement, rule, ())[0] == placement
    order = order_rule(chain, cut, under)
    assert [one.layers[0] for one in order.chunks] == list(cut.cuts[:-1])


def test_a_second_round_goes_on_from_the_best_walks() -> None:
    chain = chain_of_layers(table(7, 14, 3, 6))
    once = CooptimizeParams(walks=6)
    again = CooptimizeParams(walks=6, again=AgainParams(walks=2, share=0.5))
    both = every_walk(chain, budget=Budget(evaluations=4000), params=again)
    first = every_walk(chain, budget=Budget(evaluations=2000), params=once)
    assert [len(found[0].reports) for found in (first, both)] == [6, 8]
    assert both[0].timeline.makespan_ns <= first[0].timeline.makespan_ns
    assert both[0].evaluations <= 4000
    later = both[0].reports[6:]
    assert later[0].start_ns == min(report.best_ns for report in both[0].reports[:6])
    times = [found.timeline.makespan_ns for found in both]
    assert times == sorted(times)
    assert len({found.placement for found in both}) == len(both)
    for found in both:
        assert not check(found.graph, found.schedule, found.timeline)
        assert evaluate(chain, found.placement, found.rule) >= found.timeline.makespan_ns


def test_arranging_takes_a_small_part_of_a_run() -> None:
    chain = chain_of_layers(table(1, 40, 4, 16))
    counts = [evaluations_for(chain, n) for n in (0, 1, 100, 10_000, 10**9)]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (FEWEST_EVALUATIONS, MOST_EVALUATIONS)
    assert evaluations_for(chain) == MOST_EVALUATIONS
    large = replace(chain, num_microbatches=4096)
    assert FEWEST_EVALUATIONS <= evaluations_for(large) < MOST_EVALUATIONS
