"""PipeTune's evaluation runs from seeds, and says what it must."""

from __future__ import annotations

import pytest

from pipeloom.timeline import check
from pipeloom.tuning import TuningSpec
from pipeloom_lab.reproduce import Options
from pipeloom_lab.reproduce.pipetune import PARTS
from pipeloom_lab.reproduce.pipetune.execution import ranked_alike
from pipeloom_lab.reproduce.pipetune.setups import (
    BALANCED,
    MIXTURES,
    ON_A,
    ORIGINAL,
    OURS,
    PIPETUNE,
    batch_of,
    best_static,
    emulated,
    mean_seconds,
    run_batch,
    static_sizes,
    steps_of,
)

SMALL = Options(seeds=(0,), iterations=1, search_s=0.1)
SLOW = ("figure-6", "regime", "figure-8", "figure-9", "figure-11", "sensitivity", "replicas", "table-2")


@pytest.mark.parametrize("part", [p for p in PARTS if p.name not in SLOW], ids=lambda part: part.name)
def test_every_part_runs(part: object) -> None:
    outcome = part.run(SMALL)  # type: ignore[attr-defined]
    assert outcome.tables
    assert all(figure.svg.startswith(("<svg", "<?xml")) for figure in outcome.figures)


@pytest.mark.soak
@pytest.mark.parametrize("part", [p for p in PARTS if p.name in SLOW], ids=lambda part: part.name)
def test_slow_parts_run(part: object) -> None:
    assert part.run(SMALL).tables  # type: ignore[attr-defined]


@pytest.mark.parametrize("mixture", MIXTURES)
def test_every_technique_helps_and_ours_more(mixture: str) -> None:
    seconds = mean_seconds(ON_A["13b"], mixture, Options(seeds=(0, 1), iterations=2, search_s=0.1))
    # A batch of little text fits into one microbatch, which leaves nothing to balance.
    assert seconds[ORIGINAL] >= seconds[BALANCED] > seconds[PIPETUNE] > seconds[OURS]


def test_the_best_static_size_is_no_worse_than_the_largest() -> None:
    options = Options(seeds=(0, 1), iterations=1, search_s=0.1)
    for name in (ORIGINAL, BALANCED):
        size, seconds = best_static(ON_A["13b"], "datamix2", options, name)
        assert size in static_sizes(emulated(ON_A["13b"]))
        largest = mean_seconds(ON_A["13b"], "datamix2", options, {name: steps_of(ON_A["13b"])[name]})
        assert seconds <= largest[name] * (1 + 1e-12)
        assert size < emulated(ON_A["13b"]).max_contexts  # one or two microbatches leave ranks idle


def test_pairs_that_are_ranked_alike_are_counted() -> None:
    assert ranked_alike([1.0, 2.0, 3.0], [10.0, 30.0, 20.0]) == (2, 3)
    assert ranked_alike([1.0, 2.0], [5.0, 5.001]) == (0, 0)


def test_what_is_timed_is_feasible() -> None:
    setup = ON_A["13b"]
    setting = emulated(setup)
    batch = batch_of(setup, "datamix2", 7)
    for spec in (*steps_of(setup).values(), TuningSpec()):
        one = run_batch(setting, batch, spec, 0)
        assert not check(one.plan.graph, one.plan.schedule, one.timeline)
        assert int(one.timeline.peak_bytes.max()) <= setting.capacity_bytes
        # Decided by tables, timed by operators: they agree.
        assert one.tuned.planned_ns == pytest.approx(one.timeline.makespan_ns, rel=0.005)
