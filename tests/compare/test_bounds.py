"""The lower bound of every system that `pipeloom compare` times is no more than its time."""

from __future__ import annotations

import pytest

from pipeloom.compare.comparison import compare_setting
from pipeloom.compare.gain import packing_system
from pipeloom.compare.iterations import Iterations
from pipeloom.compare.model_on_cluster import ModelOnCluster, draw_iteration, put_on_cluster
from pipeloom.compare.registry import BASELINES, OURS, suitable
from pipeloom.compare.result import track_of
from pipeloom.report.track import key_figures
from pipeloom.search import Budget
from pipeloom.spec.parallelism import Degrees
from tests.compare.cases import vlm_on_h800

LARGE = ("vlm-7b", "t2v-s", "dit-5b", "vlm-s")


def check_systems(setting: ModelOnCluster, names: list[str], seed: int, evaluations: int) -> None:
    """Time systems on one iteration; the gap of a time below its bound is an error."""
    iterations = Iterations([draw_iteration(setting, 4, 100)], draw_iteration(setting, 4, seed))
    found = list(compare_setting(setting, iterations, names, budget=Budget(evaluations=evaluations), seed=seed))
    assert any(one.result is not None for one in found)
    for one in found:
        if one.result is not None:
            assert one.result.lower_bound.ns <= one.result.timeline.makespan_ns, one.name
            assert (key_figures(track_of(one.result)).gap or 0.0) >= 0


@pytest.mark.parametrize("evaluations", [1, 30])
def test_fast_systems_have_bounds(evaluations: int) -> None:
    setting = vlm_on_h800(Degrees(tensor=2, pipeline=2), vision=4, lm=6)
    check_systems(setting, ["1f1b", "interleaved", "zero-bubble", "dynapipe", "fsdp"], 0, evaluations)


@pytest.mark.full
@pytest.mark.parametrize("evaluations", [1, 15, 60])
def test_every_system_has_a_bound(evaluations: int) -> None:
    setting = vlm_on_h800(Degrees(tensor=2, pipeline=2), vision=6, lm=8)
    check_systems(setting, list(suitable(setting)), 0, evaluations)


@pytest.mark.soak
@pytest.mark.parametrize("model", LARGE)
@pytest.mark.parametrize("evaluations", [1, 15, 200])
def test_every_system_has_a_bound_on_every_model(model: str, evaluations: int) -> None:
    setting = put_on_cluster(model, "dip-h800-64", Degrees(tensor=2, pipeline=4))
    for seed in range(3):
        check_systems(setting, [name for name in BASELINES if name in suitable(setting)], seed, evaluations)


@pytest.mark.full
@pytest.mark.parametrize("evaluations", [1, 15, 60])
def test_a_packing_of_its_own_has_a_bound(evaluations: int) -> None:
    setting = vlm_on_h800(Degrees(tensor=2, pipeline=2), vision=6, lm=8)
    iterations = Iterations([draw_iteration(setting, 4, 100)], draw_iteration(setting, 4, 0))
    (ours,) = compare_setting(setting, iterations, [OURS], budget=Budget(evaluations=5))
    assert ours.layout is not None
    made = packing_system("packed", setting, ours.layout, 8192)
    result = made.run(draw_iteration(setting, 4, 0), Budget(evaluations=evaluations), 0)
    assert result.lower_bound.ns <= result.timeline.makespan_ns
