"""DIP's ablation steps and the jitter of its passes."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from pipeloom.compare.baseline import searched_system
from pipeloom.compare.baselines.dip import dip_layout, our_layout
from pipeloom.compare.model_on_cluster import draw_iteration
from pipeloom.search import Budget
from pipeloom.spec.parallelism import Degrees
from pipeloom.timeline import check
from pipeloom_lab.reproduce.dip.runs import jittered_s, partitioned, unadaptive_system
from tests.compare.cases import vlm_on_h800


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
