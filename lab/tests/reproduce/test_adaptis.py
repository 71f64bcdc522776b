"""AdaPtis' evaluation: what can be checked without running it whole."""

from __future__ import annotations

from itertools import product

import pytest

from pipeloom_lab.adaptis.systems import run_system
from pipeloom_lab.reproduce import Options
from pipeloom_lab.reproduce.adaptis import PARTS
from pipeloom_lab.reproduce.adaptis.characterize import figure_3, figure_4, partitions, placements, schedules
from pipeloom_lab.reproduce.adaptis.depths import Cell, _headline
from pipeloom_lab.reproduce.adaptis.execution import execute
from pipeloom_lab.reproduce.adaptis.generation import continued
from pipeloom_lab.reproduce.adaptis.scaling import grid
from pipeloom_lab.reproduce.adaptis.setups import (
    BASELINES,
    PaperSetup,
    best_baseline,
    bubble_share,
    chains,
    iteration_s,
    run_baseline,
    seconds_of,
    setup_of,
)
from pipeloom_lab.reproduce.adaptis.throughput import _extremes
from pipeloom_lab.reproduce.part import Line, Part
from tests.chains import uniform_layers


def test_every_figure_of_the_evaluation_has_a_part() -> None:
    numbers = (1, 3, 4, 8, "8-depths", 9, 10, 11, 12, 13, "13-programs", 14, 15)
    assert [part.name for part in PARTS] == [f"figure-{n}" for n in numbers]


def test_counts_of_the_search_space_equal_enumeration() -> None:
    assert partitions(5, 3) == 6
    groups = {
        frozenset(frozenset(s for s in range(4) if put[s] == r) for r in range(3))
        for put in product(range(3), repeat=4)
        if len(set(put)) == 3
    }
    assert placements(4, 3) == len(groups)
    assert schedules(2) == 20
    assert figure_4(Options()).figures[0].svg.startswith("<?xml")


@pytest.mark.parametrize("name", ["S-1F1B", "I-1F1B", "ZB-H1", "ZB-V", "Hanayo"])
def test_emulated_ranks_run_what_was_planned(name: str) -> None:
    baseline = run_system(name, uniform_layers(8, 2, 4))
    assert execute(baseline, 0) == baseline.timeline.makespan_ns


def test_setups_are_emulated_and_named_systems_run() -> None:
    setup = setup_of("Gemma", "Small", 2048, 2)
    assert setup.num_microbatches == 2 * setup.pipeline
    whole, split = chains(setup)
    assert not whole.weight_ns.any()
    assert split.weight_ns.any()
    # Halves of a backward are rounded each.
    assert abs(whole.total_ns - split.total_ns).max() <= 1
    assert whole.layer_names[0] == "embedding"
    assert whole.layer_names[-1] == "head"
    shares = {name: bubble_share(run_system(system, whole)) for name, system in BASELINES.items()}
    assert shares["Mist"] < shares["S-1F1B"]  # the head is heavy


def test_three_steps_get_faster() -> None:
    outcome = figure_3(Options(seeds=(0,), search_s=0.4))
    speedups = [float(row[2]) for row in outcome.tables[0].rows]
    assert speedups == sorted(speedups)
    assert speedups[-1] > 1.5


def test_an_exponential_is_continued_beyond_what_was_solved() -> None:
    counts = [1.0, 2.0, 4.0, 8.0]
    beyond, times = continued(Line(counts, [0.01 * 3**x for x in counts]))
    assert beyond == [16.0, 32.0]
    assert times == pytest.approx([0.01 * 3**16, 0.01 * 3**32])


def test_gains_are_averaged_over_what_fits() -> None:
    cells = [
        Cell("one", 4, 2, {"Mist": 1.2, "AdaPtis": 1.1, "ours": 1.0}, 0.5, "Mist"),
        Cell("two", 4, 2, {"AdaPtis": 2.0, "ours": 2.0}, 2.0, ""),  # Mist does not fit
        Cell("three", 4, 2, {"Mist": 3.0}, 1.0, "Mist"),  # what is searched does not
    ]
    (row,) = _headline([("4", "2", cells)]).rows
    over_mist, largest, theirs, own, least, most, bound = row[2:9]
    assert (over_mist, largest, theirs) == ("1.200", "1.200", "1.091")
    assert (own, least, most) == ("1.050", "1.000", "1.100")
    assert bound == "1.600"
    assert _headline([("4", "2", [])]).rows[0][2] == ""


def test_extremes_are_of_what_fits() -> None:
    table = _extremes({"Mist": [1.2, 1.0, 1.1], "ZB": []})
    assert table.rows == (("Mist", "3", "1.00", "1.20", "1.10", "1.27"),)


@pytest.mark.parametrize(("family", "devices"), [("Nemotron-H", 8), ("DeepSeek", 32), ("DeepSeek", 128)])
def test_a_grid_uses_all_devices_and_leaves_every_rank_a_microbatch(family: str, devices: int) -> None:
    points = grid(family, devices, 256)
    assert len(set(points)) == len(points)
    assert {point.pipeline for point in points} <= {4, 8, 16}
    for point in points:
        assert point.degrees.num_devices == devices
        assert point.num_microbatches * point.data == 256
        assert point.num_microbatches >= point.pipeline
    experts = {point.expert for point in points}
    assert experts == ({1, 8} if family == "DeepSeek" else {1})


def test_more_replicas_pay_for_reducing_their_gradients() -> None:
    one, many = (PaperSetup("nemotron-h-small", 4, 1, 8, 2048, data) for data in (1, 16))
    alone, together = (run_baseline("S-1F1B", setup) for setup in (one, many))
    ends = [iteration_s(setup, s) - seconds_of(s) for setup, s in ((one, alone), (many, together))]
    assert 0 < ends[0] < ends[1], "an update alone costs something, and a reduction more"
    best = best_baseline(one)
    assert best is not None
    assert seconds_of(best) <= min(seconds_of(run_baseline(name, one)) for name in BASELINES.values())


@pytest.mark.soak
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_part_runs(part: Part) -> None:
    outcome = part.run(Options(seeds=(0,), iterations=1, search_s=0.08, solver_s=1.0))
    assert outcome.tables
    assert all(table.rows for table in outcome.tables)
    assert all(figure.svg.startswith(("<svg", "<?xml")) for figure in outcome.figures)
