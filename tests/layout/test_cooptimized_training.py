"""A measured profile as a layer table, and the layout that is arranged on it."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from pipeloom.cost import LayerFit, Profile, ProfileCosts
from pipeloom.errors import InputError
from pipeloom.io import read_layers, read_layout, read_rule, write_layers, write_layout, write_rule
from pipeloom.layout import layout_for
from pipeloom.layout.training import Preview, arrange_training_layout, training_layers
from pipeloom.packing import PackingSpec, packed_batch
from pipeloom.plan import to_text
from pipeloom.planner import PlanningProblem, check_problem
from pipeloom.planner.planning import plan_batch
from pipeloom.planner.problem_file import decode_problem, encode_problem
from pipeloom.search import Budget, ChunkRule, OrderRule, SearchParams
from pipeloom.spec import Batch, Chunk, LayerSpec, Layout, ModelSpec, ModuleLayout, ModuleSpec, Sample, TensorShape
from tests.cases import vlm_spec

RANKS = 3
PACKING = PackingSpec(40, "first_fit_decreasing")


def language_model(seed: int) -> ProfileCosts:
    """Ten unlike layers, of which the last is by far the heaviest."""
    rng = random.Random(seed)
    shape = TensorShape(("tokens", 8))
    kinds = ("Embedding[80]", *(rng.choice(("Mamba[5]", "Attention[7]", "Experts[9]")) for _ in range(8)))
    layers = tuple(LayerSpec(kind, shape, num_parameters=100) for kind in (*kinds, "Head[80]"))
    model = ModelSpec("chain", (ModuleSpec(name="text", reads="sequence", layers=layers),))
    fits = {}
    for kind in dict.fromkeys((*kinds, "Head[80]")):
        cost = 1e-6 * rng.randint(20, 90) * (5 if kind == "Head[80]" else 1)
        fits[f"text/{kind}"] = LayerFit((1e-5, 0, cost, 0), (2e-5, 0, 2 * cost, 0), (0, 0, 32.0 * rng.randint(1, 3), 0))
    return ProfileCosts(model, Profile("made", fits))


def batches(seed: int) -> list[Batch]:
    draw = random.Random(seed)
    return [Batch(tuple(Sample(f"{b}.{i}", 4 + draw.randrange(20)) for i in range(12)), b) for b in range(3)]


@pytest.mark.parametrize("seed", range(3))
def test_the_table_adds_up_to_what_training_costs(seed, tmp_path):
    costs = language_model(seed)
    table = training_layers(Preview(costs, PACKING, batches(seed), RANKS, capacity_bytes=10**9))
    assert table.layers[0].name == "embedding"
    assert table.layers[-1].name == "head"
    assert len({layer.name for layer in table.layers}) == len(table.layers) == 10
    whole = Layout(1, (ModuleLayout("text"),), (Chunk("text", (0, 9), 0),))
    works = [
        part.workload
        for batch in batches(seed)
        for microbatch in packed_batch(batch, costs.model, whole, costs, PACKING).microbatches
        for part in microbatch.parts[0]
    ]
    assert table.num_microbatches == round(len(works) / 3)
    each = [costs.chunk_costs(whole.chunks[0], work)[0] for work in works]
    assert sum(layer.forward_s for layer in table.layers) == pytest.approx(
        sum(cost.forward_s for cost in each) / len(each)
    )
    assert sum(layer.total_backward_s for layer in table.layers) == pytest.approx(
        sum(cost.backward_s for cost in each) / len(each)
    )
    assert sum(layer.held_bytes for layer in table.layers) == costs.static_bytes(whole.chunks[0])
    # Whatever fits by the table fits in training.
    assert sum(layer.activation_bytes for layer in table.layers) >= max(c.activation_bytes for c in each)
    # Less what one layer's computation and its messages need.
    assert table.memory_capacity_bytes is not None
    assert all(0 < 10**9 - capacity < 10**4 for capacity in table.memory_capacity_bytes)
    write_layers(tmp_path / "layers.json", table)
    assert read_layers(tmp_path / "layers.json") == table
    # Where packing is planned, as many microbatches as the planner tries first.
    planned = Preview(costs, PackingSpec(40), batches(seed), RANKS)
    assert {training_layers(replace(planned, num_replicas=n)).num_microbatches for n in (1, 2)} == {2 * RANKS}
    halved = training_layers(Preview(costs, PACKING, batches(seed), RANKS, num_replicas=2))
    assert halved.num_microbatches == max(1, round(len(works) / 6))


@pytest.mark.parametrize("seed", range(3))
def test_the_arranged_layout_is_of_the_model_and_trains(seed):
    costs = language_model(seed)
    preview = Preview(costs, PACKING, batches(seed)[:2], RANKS)
    trials = arrange_training_layout(preview, evaluations=600, trial=Budget(evaluations=10), seed=seed)
    layout, rule = trials[0].layout, trials[0].rule
    assert [module.name for module in layout.modules] == ["text"]
    assert rule is not None
    rule.check_layout(layout)
    assert len({trial.layout.chunks for trial in trials}) == len(trials) > 1
    assert trials[0].seconds == min(trial.seconds for trial in trials)
    again = arrange_training_layout(preview, evaluations=600, trial=Budget(evaluations=10), seed=seed)
    assert again == trials, "a resumed run comes to the layout that it had"
    for batch in batches(seed + 100):
        made = plan_batch(PlanningProblem(costs.model, layout, costs, PACKING), batch, budget=Budget(evaluations=20))
        assert made.timeline.makespan_ns >= made.lower_bound.ns


@pytest.mark.parametrize("seed", range(3))
def test_a_layout_read_again_with_its_rule_gives_the_same_order(seed, tmp_path):
    """From memory, from files, and over the wire."""
    costs = language_model(seed)
    preview = Preview(costs, PACKING, batches(seed), RANKS)
    found = arrange_training_layout(preview, evaluations=400, trial=Budget(evaluations=5), seed=seed)[0]
    layout = found.layout
    assert found.rule is not None
    write_layout(tmp_path / "layout.json", layout)
    assert write_rule(tmp_path / "layout.json", found.rule) == tmp_path / "layout.rule.json"
    again = read_layout(tmp_path / "layout.json")
    rule = read_rule(tmp_path / "layout.json", again)
    assert rule == found.rule
    read = PlanningProblem(costs.model, again, costs, PACKING, search=SearchParams(rules=(rule,)))
    check_problem(read, "layout.json", "profile.json")
    wired = decode_problem(encode_problem(read))
    here = PlanningProblem(costs.model, layout, costs, PACKING, search=SearchParams(rules=(found.rule,)))
    for batch in batches(seed + 100):
        made = [plan_batch(problem, batch, budget=Budget(evaluations=2)) for problem in (here, wired)]
        assert to_text(made[0].plan) == to_text(made[1].plan)
        bare = plan_batch(replace(here, search=SearchParams()), batch, budget=Budget(evaluations=1))
        assert made[0].timeline.makespan_ns <= bare.timeline.makespan_ns


def test_a_rule_beside_another_layout_is_named(tmp_path):
    path = tmp_path / "layout.json"
    layout = Layout(2, (ModuleLayout("lm"),), (Chunk("lm", (0, 3), 0), Chunk("lm", (4, 7), 1)))
    write_layout(path, layout)
    assert read_rule(path, layout) is None
    rule = OrderRule((ChunkRule((0, 3), 0, 0.0, 1.0), ChunkRule((4, 7), 1, 0.0, 1.0, limit=2)))
    write_rule(path, rule)
    assert read_rule(path, layout) == rule
    assert write_rule(tmp_path / "other.json.gz", rule).name == "other.rule.json.gz"
    assert read_rule(tmp_path / "other.json.gz", layout) == rule
    other = Layout(2, layout.modules, (Chunk("lm", (0, 4), 0), Chunk("lm", (5, 7), 1)))
    with pytest.raises(
        InputError, match=r"layout.rule.json: chunks\[0\]: has layers \[0, 3\] on rank 0, .* or remove "
    ):
        read_rule(path, other)
    document = json.loads((tmp_path / "layout.rule.json").read_text())
    for change, message in (
        ({"colour": "red"}, "layout.rule.json: colour: is not a known field"),
        ({"format": "pipeloom.rule/9"}, "layout.rule.json: format: 'pipeloom.rule/9'"),
        ({"period": 0}, "layout.rule.json: period: 0 is below 1"),
        ({"chunks": [{**document["chunks"][0], "limit": 0}]}, r"layout.rule.json: chunks\[0\].limit: 0 is below 1"),
        ({"chunks": [{"rank": 0}]}, r"layout.rule.json: chunks\[0\].layers: is missing"),
    ):
        (tmp_path / "layout.rule.json").write_text(json.dumps(document | change))
        with pytest.raises(InputError, match=message):
            read_rule(path, layout)
    costs = language_model(0)
    whole = Layout(1, (ModuleLayout("text"),), (Chunk("text", (0, 9), 0),))
    problem = PlanningProblem(costs.model, whole, costs, PACKING, search=SearchParams(rules=(rule,)))
    with pytest.raises(InputError, match=r"setup.json: rule.chunks: are 2, the layout has 1"):
        check_problem(problem, "setup.json", "setup.json")


def test_what_is_no_chain_or_of_another_model_is_named():
    model = vlm_spec(4, 6)
    fit = LayerFit((1e-4, 0, 0, 0), (1e-4, 0, 0, 0), (0, 0, 8, 0))
    kinds = {f"{m.name}/{layer.kind}": fit for m in model.modules for layer in m.flat_layers}
    with pytest.raises(InputError, match="has modules vision, lm; arrange takes one chain"):
        training_layers(Preview(ProfileCosts(model, Profile("made", kinds)), PACKING, batches(0), 2))
    costs = language_model(0)
    with pytest.raises(InputError, match="give at least one batch"):
        training_layers(Preview(costs, PACKING, [], 2))
    short = Layout(2, (ModuleLayout("lm"),), (Chunk("lm", (0, 3), 0), Chunk("lm", (4, 7), 1)))
    with pytest.raises(InputError, match="module 'text': has 8 layers, in the model it has 10"):
        layout_for(short, costs.model)
    with pytest.raises(InputError, match="modules: are lm, the model has vision, lm"):
        layout_for(short, model)


def test_a_layout_of_several_modules_takes_frozen_and_order_from_the_model():
    model = vlm_spec(2, 4)
    given = Layout(
        2,
        (ModuleLayout("vision", frozen=True, on_ranks="replicated", sub_microbatch=3), ModuleLayout("lm", ("vision",))),
        (Chunk("vision", (0, 1), 0), Chunk("vision", (0, 1), 1), Chunk("lm", (0, 2), 1), Chunk("lm", (3, 3), 0)),
    )
    fitted = layout_for(given, model)
    assert fitted.chunks == given.chunks
    assert [m.frozen for m in fitted.modules] == [m.frozen for m in model.modules]
    assert fitted.modules[0].sub_microbatch == 3
    part = Layout(2, given.modules, (Chunk("vision", (0, 0), 0), Chunk("vision", (0, 0), 1), *given.chunks[2:]))
    with pytest.raises(InputError, match="module 'vision': has 1 layers, in the model it has 2"):
        layout_for(part, model)
