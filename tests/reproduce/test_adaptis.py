"""AdaPtis' evaluation: what can be checked without running it whole."""

from __future__ import annotations

from itertools import product

import pytest

from pipeloom.arrange.systems import run_system
from pipeloom.reproduce import Options
from pipeloom.reproduce.adaptis import PARTS
from pipeloom.reproduce.adaptis.characterise import figure_3, figure_4, partitions, placements, schedules
from pipeloom.reproduce.adaptis.execution import execute
from pipeloom.reproduce.adaptis.setups import BASELINES, bubble_share, chains, setup_of
from tests.arrange.test_systems import uniform


def test_every_figure_of_the_evaluation_has_a_part() -> None:
    numbers = (1, 3, 4, 8, 9, 10, 11, 12, 13, 14, 15)
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
    standing = run_system(name, uniform(8, 2, 4))
    assert execute(standing, 0) == standing.timeline.makespan_ns


def test_setups_are_emulated_and_named_systems_run() -> None:
    setup = setup_of("Gemma", "Small", 2048, 2)
    assert (setup.pipeline, setup.num_microbatches) == (4, 8)
    whole, split = chains(setup)
    assert not whole.weight_ns.any()
    assert split.weight_ns.any()
    assert (whole.total_ns == split.total_ns).all()
    assert whole.layer_names[0] == "embedding"
    assert whole.layer_names[-1] == "head"
    shares = {name: bubble_share(run_system(system, whole)) for name, system in BASELINES.items()}
    assert shares["Mist"] < shares["S-1F1B"]  # the head is heavy


def test_three_steps_get_faster() -> None:
    outcome = figure_3(Options(seeds=(0,), search_s=0.1))
    speedups = [float(row[2]) for row in outcome.tables[0].rows]
    assert speedups == sorted(speedups)
    assert speedups[-1] > 1.5
