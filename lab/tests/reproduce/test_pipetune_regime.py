"""PipeTune in its paper's regime: memory, contexts filled up, and what the planner does in the same."""

from __future__ import annotations

import numpy as np
import pytest

from pipeloom.planner.joint import decide
from pipeloom.search import Budget
from pipeloom.timeline import check
from pipeloom.tuning import TuningSpec
from pipeloom_lab.reproduce import Options
from pipeloom_lab.reproduce.pipetune.regime import (
    HELD,
    PAPERS,
    STRATEGIES,
    held_factor,
    joined,
    layouts,
    padded,
    regime,
    tuned_seconds,
)
from pipeloom_lab.reproduce.pipetune.setups import (
    MOST_CONTEXTS,
    ON_A,
    ON_B,
    ORIGINAL,
    PIPETUNE,
    RECOMPUTED,
    batches,
    emulated,
    max_contexts,
    run_batch,
    steps_of,
)

ONE = Options(seeds=(0,), iterations=1, search_s=0.1)


def test_memory_holds_as_many_contexts_as_the_paper_says_and_no_more() -> None:
    setting = emulated(HELD)
    assert regime(HELD).max_contexts == MOST_CONTEXTS
    known = (setting.setup, setting.costs, setting.layout, setting.capacity_bytes, MOST_CONTEXTS + 1)
    assert max_contexts(*known) == MOST_CONTEXTS + 1
    assert max_contexts(*known, held_factor()) == MOST_CONTEXTS
    # Larger models hold fewer; whoever recomputes more holds more.
    for on in (ON_A, ON_B):
        rows = [[regime(on[size], each).max_contexts for each in STRATEGIES] for size in ("3b", "7b", "13b")]
        assert (np.diff(rows, axis=0) <= 0).all()
        assert (np.diff(rows, axis=1) >= 0).all()


@pytest.mark.parametrize("policy", ["random", "algorithm1_opened"])
def test_contexts_that_are_filled_up_have_all_samples_and_one_length(policy: str) -> None:
    setting = emulated(ON_A["13b"])
    ((seed, batch),) = batches(setting.setup, "datamix2", ONE)
    filled = padded(setting, batch, policy, seed)  # type: ignore[arg-type]
    context = setting.setup.context
    assert {s.id for s in batch.samples} <= {s.id for s in filled.samples}
    total = sum(s.sequence_tokens for s in filled.samples)
    assert total % context == 0
    for contexts in (1, 2, 3):
        spec = TuningSpec("first_fit", "fixed", "given", "off")
        found = run_batch(setting, filled, spec, seed, contexts * context)
        tokens = [sum(filled.samples[i].sequence_tokens for i in group) for group in found.tuned.groups]
        assert tokens[:-1] == [contexts * context] * (len(tokens) - 1)
        assert sum(tokens) == total
        assert not check(found.plan.graph, found.plan.schedule, found.timeline)


def test_settings_take_the_recomputation_that_is_fastest_for_them() -> None:
    setup = ON_A["13b"]
    drawn, steps = list(batches(setup, "datamix2", ONE)), steps_of(setup)
    alone = [tuned_seconds(setup, drawn, steps[ORIGINAL], strategies=(each,)) for each in STRATEGIES]
    assert tuned_seconds(setup, drawn, steps[ORIGINAL]) == min(each for each in alone if each)
    assert tuned_seconds(setup, drawn, steps[ORIGINAL], contexts=MOST_CONTEXTS + 1) is None
    whole, filled = (tuned_seconds(setup, drawn, steps[PIPETUNE], contexts=2, pad=pad) for pad in (False, True))
    assert whole is not None
    assert filled is not None
    assert whole[0] < filled[0]


def test_the_joined_planner_keeps_to_the_same_memory() -> None:
    setup = ON_A["13b"]
    ((seed, batch),) = batches(setup, "datamix1", ONE)
    for name in layouts(setup):
        problem = joined(setup, name)
        found = decide(problem.with_search(seed=seed), batch, Budget(evaluations=20))
        assert not check(found.graph, found.schedule, found.timeline)
        setting, static = emulated(setup), found.graph.static_bytes
        peak = static + held_factor() * (found.timeline.peak_bytes - static)
        assert (peak <= setting.capacity_bytes * (1 + 1e-9)).all()
    assert layouts(setup)[PAPERS] == emulated(setup, recomputed=RECOMPUTED).layout
