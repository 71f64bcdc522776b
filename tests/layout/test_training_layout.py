"""The layout of a training run: the fastest that was tried, the same again, refused where nothing can be chosen."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pipeloom.cost import LayerFit, Profile, ProfileCosts
from pipeloom.errors import InputError, NothingFoundError
from pipeloom.layout import ModulePlacement, encoder_first, layout_for, replicated, separate
from pipeloom.layout.choose import LayoutDraft, LayoutEvaluation, evaluate_layout, search_layouts
from pipeloom.layout.training import Preview, choose_training_layout
from pipeloom.packing import PackingSpec
from pipeloom.planner.planning import plan_batch
from pipeloom.planner.problem import PlanningProblem
from pipeloom.search import Budget
from pipeloom.spec import Batch, Sample
from tests.cases import vlm_spec

FIT = LayerFit((1e-4, 0, 1e-5, 1e-8), (2e-4, 0, 2e-5, 2e-8), (0, 0, 8, 0))
FEW = 200
MODEL = vlm_spec(4, 6)
COSTS = ProfileCosts(
    MODEL,
    Profile(
        "made",
        {f"{m.name}/{layer.kind}": FIT for m in MODEL.modules for layer in m.flat_layers},
        typical_s={f"{m.name}/{layer.kind}": 3e-3 for m in MODEL.modules for layer in m.flat_layers},
    ),
)


def batches(seed: int) -> list[Batch]:
    draw = random.Random(seed)
    return [
        Batch(tuple(Sample(f"{b}.{i}", 4 + draw.randrange(8), (4,) * draw.randrange(1, 4)) for i in range(8)), b)
        for b in range(2)
    ]


@pytest.mark.parametrize("policy", ["planned", "balanced"])
def test_each_replica_has_the_configured_number_of_microbatches(policy) -> None:
    batch = Batch(tuple(Sample(str(i), 10, (4,)) for i in range(32)))
    preview = Preview(COSTS, PackingSpec(1000, policy, num_microbatches=8), [batch], 2, num_replicas=4)
    assert preview.layers().num_microbatches == 8


@pytest.mark.parametrize("policy", ["first_fit_decreasing", "balanced"])
def test_the_chosen_layout_is_the_fastest_tried_and_trains(policy):
    packing = PackingSpec(30, policy=policy)
    trials = choose_training_layout(
        Preview(COSTS, packing, batches(0), 2), evaluations=FEW, trial=Budget(evaluations=40)
    )
    assert len({trial.name for trial in trials}) == len(trials) > 5
    chosen = trials[0]
    assert chosen.seconds == min(t.seconds for t in trials if not t.ruled_out)
    assert chosen.seconds <= min(t.seconds for t in trials)
    assert chosen.layout.num_ranks == 2
    # Arrangements are among them, and their rules go with them.
    assert any(trial.rule is not None for trial in trials)
    # It plans, and lowers to plans that verify, on batches that it was not chosen on.
    for batch in batches(1):
        made = plan_batch(PlanningProblem(MODEL, chosen.layout, COSTS, packing), batch, budget=Budget(evaluations=20))
        assert made.timeline.makespan_ns >= made.lower_bound.ns
    again = choose_training_layout(
        Preview(COSTS, packing, batches(0), 2), evaluations=FEW, trial=Budget(evaluations=40)
    )
    assert again == trials


def test_replicated_modules_pay_for_their_gradients():
    trials = choose_training_layout(
        Preview(COSTS, PackingSpec(30), batches(0), 2), evaluations=FEW, trial=Budget(evaluations=20)
    )
    whole = [t for t in trials if "replicated" in t.name]
    assert whole
    assert all(t.layout == replicated(t.layout, ["vision"]) for t in whole)


def test_what_cannot_be_chosen_is_named():
    with pytest.raises(InputError, match="give at least one batch"):
        choose_training_layout(Preview(COSTS, PackingSpec(30), [], 2), evaluations=FEW)
    with pytest.raises(InputError, match="use fewer ranks"):
        choose_training_layout(Preview(COSTS, PackingSpec(30), batches(0), 7), evaluations=FEW)


def test_a_module_with_nothing_to_do_is_laid_out_with_the_others():
    texts = [Batch((Sample("a", 5), Sample("b", 6)))]
    trials = choose_training_layout(
        Preview(COSTS, PackingSpec(30), texts, 2), evaluations=FEW, trial=Budget(evaluations=20)
    )
    layout = trials[0].layout
    assert [module.name for module in layout.modules] == ["vision", "lm"]
    assert layout.module("vision").sub_microbatch is None


def test_the_nearest_are_compared_on_all_batches():
    """Of more than two batches, under other seeds: a layout may be nearest on the first two by luck."""
    three = [*batches(0), *batches(3)[:1]]
    preview = Preview(COSTS, PackingSpec(30, "balanced"), three, 2)
    trials = choose_training_layout(preview, evaluations=FEW, trial=Budget(evaluations=10))
    draft = LayoutDraft(trials[0].name, trials[0].layout, trials[0].rule)
    assert trials[0] == evaluate_layout(preview.sampled(), draft, Budget(evaluations=10), 3)


@pytest.mark.parametrize("failing", [6, 1000])
def test_a_layout_that_fits_only_the_first_batches_is_not_chosen(monkeypatch, failing):
    """If a later batch fits under none of the nearest layouts, the next layouts are planned on all batches."""
    tried = []

    def evaluated(*arguments):
        tried.append(arguments[1].name)
        found = evaluate_layout(*arguments)
        return replace(found, seconds=float("inf"), problem="too large") if len(tried) <= failing else found

    monkeypatch.setattr("pipeloom.layout.training.evaluate_layout", evaluated)
    preview = Preview(COSTS, PackingSpec(30, "balanced"), [*batches(0), *batches(3)[:1]], 2)
    if failing > 6:
        with pytest.raises(NothingFoundError, match="too large"):
            choose_training_layout(preview, evaluations=FEW, trial=Budget(evaluations=10))
        return
    trials = choose_training_layout(preview, evaluations=FEW, trial=Budget(evaluations=10))
    assert trials[0].name == tried[failing]
    assert len(tried) == failing + 1
    assert not trials[0].problem
    assert len({t.name for t in trials}) == len(trials)


def test_a_plan_replaces_a_start_that_was_ruled_out(monkeypatch):
    """The time of a layout that was ruled out is a lower bound, which plans of other layouts need not reach."""
    preview = Preview(COSTS, PackingSpec(30), batches(0), 2, num_tensor=2, dealable=("vision",))
    sampled, starts = preview.sampled(), []

    def evaluated(_sampled, draft, *_rest, incumbent_s=0.0):
        name, layout, rule = draft
        if not layout.encoder_dp_modules or "chain" in name or not name:
            return LayoutEvaluation(name, layout, 10.0, 1.0, rule=rule)
        starts.append(name)
        if len(starts) <= 2:  # the layout without encoder data parallelism as it is, and DIP's rules
            return LayoutEvaluation(name, layout, 2.0, 1.0, ruled_out=True)
        return LayoutEvaluation(name, layout, 9.0 - len(starts) / 1000, 1.0)

    monkeypatch.setattr("pipeloom.layout.choose.evaluate_layout", evaluated)
    search_layouts(sampled)
    (whole,) = (name for name in starts if "replicated" in name)
    assert whole.split("; ")[0] not in {name.split("; ")[0] for name in starts[:2]}


def test_layers_that_tensor_parallel_ranks_would_run_alike_use_encoder_dp() -> None:
    preview = Preview(COSTS, PackingSpec(30), batches(0), 2, num_tensor=2, dealable=("vision",))
    trials = choose_training_layout(preview, evaluations=FEW, trial=Budget(evaluations=20))
    chosen = trials[0]
    assert chosen.layout.encoder_dp_modules == {"vision"}
    assert all(t.seconds > chosen.seconds for t in trials if not t.layout.encoder_dp_modules)
    whole = [t for t in trials if t.layout.encoder_dp_modules and t.layout.module("vision").on_ranks == "replicated"]
    assert whole
    plain = Preview(COSTS, PackingSpec(30), batches(0), 2, num_tensor=2)
    assert not any(
        t.layout.encoder_dp_modules
        for t in choose_training_layout(plain, evaluations=FEW, trial=Budget(evaluations=20))
    )


def test_a_placement_names_encoder_dp() -> None:
    layout = separate(MODEL, 2, {"vision": ModulePlacement(1, 2, "dealt")}, lambda *_: 1.0)
    assert layout.encoder_dp_modules == {"vision"}
    assert layout_for(layout, MODEL) == layout
    assert encoder_first(
        MODEL, 2, lambda *_: 1.0, placements={"vision": ModulePlacement(1, 2, "dealt")}
    ).encoder_dp_modules
