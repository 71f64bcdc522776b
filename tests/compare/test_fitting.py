"""Degrees under which a model fits."""

from __future__ import annotations

from pipeloom.compare.answer import Question
from pipeloom.compare.fitting import fitting_degrees
from pipeloom.compare.iterations import Grouping, sampled_iterations
from pipeloom.compare.model_on_cluster import put_on_cluster
from pipeloom.spec.current_run import CurrentRun
from tests.compare.cases import shallow


def test_experts_of_a_run_stay_divided() -> None:
    """Of the degrees closest to a run that does not fit, some leave too few devices to divide each expert."""
    run = CurrentRun(tp=2, ep=4, etp=2, zero=0)
    setting = put_on_cluster(shallow("qwen3-30b-a3b", lm=56), "8xH100", run.degrees(8))
    iterations = sampled_iterations(setting, None, Grouping(2), 0)
    found = fitting_degrees(Question(setting, iterations, Grouping(2), ("1f1b",), run))
    assert found is not None
    assert found.expert_tensor == (2 if found.expert > 1 else 1)
