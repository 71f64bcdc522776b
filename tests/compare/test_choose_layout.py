"""Choosing a layout: it is never behind the rules' own, it tells what does not fit, replicas are dealt evenly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeloom.compare.baseline import replica_seconds, searched_system
from pipeloom.compare.baselines.dip import our_layout
from pipeloom.compare.chosen_layout import choose_layout, sampled_setting
from pipeloom.compare.model_on_cluster import draw_iteration, pack_microbatches
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.layout import ModulePlacement, even_layout, replicated
from pipeloom.layout.choose import MOST_NEAR, LayoutDraft, evaluate_layout, placement_name
from pipeloom.packing import PackingSpec, pack
from pipeloom.search import Budget, solve
from pipeloom.spec import Batch, Sample
from pipeloom.spec.parallelism import Degrees
from pipeloom.taskgraph import build_graph
from pipeloom.timeline import check
from tests.cases import ToyCosts, vlm_spec
from tests.compare.cases import vlm_on_h800


@pytest.fixture(scope="module")
def setting():
    return vlm_on_h800(Degrees(tensor=2, pipeline=2), vision=12, lm=6)


@pytest.fixture(scope="module")
def batches(setting):
    return [draw_iteration(setting, 4, 100)]


@pytest.fixture(scope="module")
def trials(setting, batches):
    return choose_layout(setting, batches, trial=Budget(evaluations=20), rounds=1)


def test_the_choice_is_the_fastest_of_what_was_tried(setting, batches, trials):
    assert trials[0].seconds == min(t.seconds for t in trials if not t.ruled_out)
    assert all(t.bound_s <= t.seconds for t in trials)
    assert any("chain" in t.name for t in trials)
    assert any("replicated" in t.name for t in trials)
    rules = evaluate_layout(
        sampled_setting(setting, batches), LayoutDraft("rules", our_layout(setting, batches)), Budget(evaluations=20), 0
    )
    assert trials[0].seconds <= rules.seconds
    with pytest.raises(InputError, match="sampled iteration"):
        choose_layout(setting, [])


@pytest.mark.parametrize("update", [False, True])
def test_layouts_are_compared_with_their_updates(setting, batches, update):
    """The updates of a rank follow its own last task, as in the iterations that are reported."""
    updating = replace(setting, update=update)
    layout = our_layout(updating, batches)
    tried = evaluate_layout(sampled_setting(updating, batches), LayoutDraft("", layout), Budget(evaluations=20), 0)
    found = searched_system("", updating, layout).run(batches[0], Budget(evaluations=20), 0)
    assert tried.seconds == pytest.approx(updating.iteration_s(found))
    assert (tried.seconds > found.iteration_s) == update
    assert tried.bound_s <= tried.seconds


def test_the_nearest_layouts_are_planned_once_more(setting, batches):
    trial = Budget(evaluations=1)
    trials = choose_layout(setting, batches, trial=trial, rounds=1)
    long = choose_layout(setting, batches, trial=trial, final=Budget(evaluations=400), rounds=1)
    assert {t.name for t in long} == {t.name for t in trials}
    before = {t.name: t for t in trials}
    again = [t for t in long if t != before[t.name]]
    assert 1 <= len(again) <= MOST_NEAR
    assert all(t in long[:MOST_NEAR] for t in again)
    assert all(t.seconds <= before[t.name].seconds for t in again if not before[t.name].ruled_out)
    assert long[0].seconds == min(t.seconds for t in long if not t.ruled_out)
    assert any(t.name.endswith("layers by number") for t in trials)


def test_encoders_are_tried_with_encoder_dp_where_a_rank_is_several_devices(setting, batches, trials):
    with_dp = [t for t in trials if t.layout.encoder_dp_modules]
    assert len(with_dp) < len(trials) / 2
    assert all(t.layout.encoder_dp_modules == {"vision"} for t in with_dp)
    for word in ("chain", "replicated", "vision all"):
        assert any(word in t.name for t in with_dp)
    fitting = next(t for t in with_dp if not t.problem and "chain" in t.name)
    # Gradients of what every device of a rank holds are added up.
    assert replica_seconds(setting, fitting.layout) > 0.0
    alone = vlm_on_h800(Degrees(tensor=1, pipeline=2), vision=12, lm=6)
    assert sampled_setting(alone, batches).encoder_dp is None


def test_a_layout_that_does_not_fit_says_why(setting, batches):
    with pytest.raises(InfeasibleError, match="optimizer state"):
        choose_layout(replace(setting, capacity_bytes=10**9), batches, trial=Budget(evaluations=1), rounds=1)


def test_replicas_get_even_work():
    """Eight equal images on two ranks: four each; every schedule of it can run."""
    model = vlm_spec(4, 4)
    samples = tuple(Sample(f"s{i}", 6, (1, 1), (3, 3)) for i in range(4))
    places = {"vision": ModulePlacement(1, 1)}
    layout = replicated(even_layout(model, 2, places, lambda _m, _l: 1.0), ["vision"])
    assert [(c.module, c.layers, c.rank) for c in layout.chunks[:2]] == [("vision", (0, 3), 0), ("vision", (0, 3), 1)]
    graph = build_graph(layout, pack(Batch(samples), model, layout, PackingSpec(8)), ToyCosts(model))
    vision = graph.module == 0
    work = [int(graph.duration_ns[vision & (graph.rank == r)].sum()) for r in range(2)]
    assert work[0] == work[1] > 0
    found = solve(graph, budget=Budget(evaluations=50), seed=0)
    assert check(graph, found.schedule, found.timeline) == ()


def test_replicated_gradients_cost_time(setting):
    places = {m.name: ModulePlacement(1, 2 if m.name == "vision" else None) for m in setting.model.modules}
    layout = even_layout(setting.model, 2, places, lambda _m, _l: 1.0)
    assert replica_seconds(setting, layout) == 0
    both = replicated(layout, ["vision"])
    share = sum(layer.num_parameters for layer in setting.model.modules[0].flat_layers) * 4 / 2 / 2
    assert replica_seconds(setting, both) == pytest.approx(2 * setting.costs.transfer_s(int(share)), rel=1e-6)
    assert placement_name(places) == "vision 2 x1, lm all x1"
    groups = draw_iteration(setting, 2, 0)
    assert len(pack_microbatches(setting, both, groups).microbatches) == 2
