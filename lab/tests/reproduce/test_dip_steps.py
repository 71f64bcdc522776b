"""DIP's ablation steps and the jitter of its passes."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from pipeloom.compare.baseline import SIZES, searched_system
from pipeloom.compare.baselines.dip import dip_layout, our_layout
from pipeloom.compare.baselines.megatron import megatron_1f1b, megatron_interleaved
from pipeloom.compare.gain import packing_system
from pipeloom.compare.iterations import Grouping, sampled_iterations
from pipeloom.compare.model_on_cluster import draw_iteration, put_on_cluster, resized
from pipeloom.compare.repacking import reordered
from pipeloom.search import Budget
from pipeloom.spec.parallelism import Degrees
from pipeloom.timeline import check
from pipeloom_lab.reproduce.dip.runs import any_size, jittered_s, own_system, partitioned, unadaptive_system
from tests.compare.cases import shallow, vlm_on_h800


@pytest.fixture(scope="module")
def timed():
    setting = vlm_on_h800(Degrees(tensor=2, pipeline=4), vision=16, lm=18)
    typical = [draw_iteration(setting, 8, 100)]
    systems = {
        "modality-aware, static order": partitioned(setting, typical),
        "interleaving": unadaptive_system("interleaving", setting, dip_layout(setting, typical), "first in, first out"),
        "ours": searched_system("ours", setting, our_layout(setting, typical)),
    }
    groups = draw_iteration(setting, 8, 0)
    return setting, {name: system.run(groups, Budget(evaluations=100), 0) for name, system in systems.items()}


@pytest.mark.parametrize("name", ["modality-aware, static order", "interleaving"])
def test_ablation_step_is_feasible_and_slower_than_ours(timed, name):
    _, found = timed
    result = found[name]
    assert result.name == name
    assert check(result.graph, result.schedule, result.timeline) == ()
    assert (result.timeline.peak_bytes <= result.graph.capacity_bytes).all()
    assert result.timeline.makespan_ns >= result.lower_bound.ns
    assert result.timeline.makespan_ns > found["ours"].timeline.makespan_ns


def test_jitter_lengthens_iterations(timed):
    plain, found = timed

    def with_jitter(jitter):
        return replace(plain, cluster=msgspec.structs.replace(plain.cluster, device=device(jitter)))

    def device(jitter):
        return msgspec.structs.replace(plain.cluster.device, jitter=jitter)

    calm, restless = with_jitter(0.0), with_jitter(0.3)
    for one in found.values():
        assert jittered_s(calm, one, 0) == pytest.approx(plain.iteration_s(one))
        assert jittered_s(restless, one, 0) == jittered_s(restless, one, 0) != jittered_s(restless, one, 1)
    # The end of an iteration is convex in the times of its passes.
    ours = found["ours"]
    assert jittered_s(restless, ours, 0, draws=300) > plain.iteration_s(ours)


def test_in_training_it_takes_the_way_to_make_microbatches_that_is_fastest_on_sampled_iterations() -> None:
    setting = put_on_cluster(shallow("vlm-7b", vision=6, lm=6), "8xH100", Degrees(pipeline=2))
    given = sampled_iterations(setting, None, Grouping(4, samples=2), 0)
    layout = our_layout(setting, given.typical)
    budget = Budget(evaluations=20)
    found = own_system("mine", setting, [layout], given.typical, 8192, budget)
    ways = [packing_system("packed", setting, layout, 8192), searched_system("given", setting, layout)]
    sampled = [[way.run(groups, budget, i).iteration_s for i, groups in enumerate(given.typical)] for way in ways]
    best = ways[int(sum(sampled[1]) < sum(sampled[0]))]
    mine = found.run(given.groups, budget, 0)
    assert found.packs
    assert not check(mine.graph, mine.schedule, mine.timeline)
    assert mine.iteration_s == best.run(given.groups, budget, 0).iteration_s
    # The bound is of all packings that were looked at.
    assert mine.lower_bound.ns <= mine.timeline.makespan_ns


def test_microbatches_of_the_best_size_are_no_slower(timed):
    setting, _ = timed
    typical, groups = [draw_iteration(setting, 8, 100)], draw_iteration(setting, 7, 5)
    plain = replace(megatron_1f1b(setting, typical), choice=None)
    each = [setting.iteration_s(plain.run(resized(groups, n), Budget(evaluations=1), 0)) for n in SIZES]
    found = any_size(plain, setting.iteration_s).run(groups, Budget(evaluations=1), 0)
    assert setting.iteration_s(found) == min(each)
    # A system that packs samples itself has its own sizes.
    packs = reordered(plain, setting)
    assert any_size(packs, setting.iteration_s) is packs


def test_layout_and_size_of_microbatches_are_chosen_together(timed):
    setting, _ = timed
    typical = [draw_iteration(setting, 8, 100)]
    chosen = megatron_interleaved(setting, typical, "time")
    alone, together = (any_size(one, setting.iteration_s) for one in (replace(chosen, choice=None), chosen))
    seconds = [setting.iteration_s(one.run(typical[0], Budget(evaluations=1), 0)) for one in (alone, together)]
    assert seconds[1] <= seconds[0]
    each = [setting.iteration_s(one.run(typical[0], Budget(evaluations=1), 0)) for one in chosen.choice.options]
    assert seconds[1] <= min(each)
