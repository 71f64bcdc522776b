"""Planning problems in files and messages, and what of them changes without new tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeloom.cost import Correction
from pipeloom.errors import InputError, PlannerError
from pipeloom.layout import encoder_first
from pipeloom.packing import PackingSpec
from pipeloom.planner import Planner, PlanningProblem, Setup, read_problem, write_problem
from pipeloom.planner.problem_file import decode_problem, encode_problem
from pipeloom.spec import RankSpec
from pipeloom.taskgraph.iteration import MemoryLimit
from pipeloom.tuning import TuningSpec
from tests.planner.cases import MemoryStore, on_cluster, random_problem, with_costs


def changed(seed: int) -> PlanningProblem:
    """A problem without default values."""
    cluster = RankSpec(memory_capacity_bytes=10**6, host_capacity_bytes=10**7, link_latency_s=0.5)
    problem = with_costs(on_cluster(random_problem(seed), cluster), held_copies={"lm/block": 2.5})
    return replace(
        problem,
        tuning=TuningSpec(pack="first_fit"),
        backend="nccl",
        search=problem.search.fast(),
        threads=2,
        budget_s=7.0,
        seed=8,
        method="portfolio",
    )


def test_a_problem_survives_a_file_and_a_message(tmp_path: Path) -> None:
    for problem in (random_problem(2), changed(2)):
        write_problem(tmp_path / "setup.json", problem)
        assert read_problem(tmp_path / "setup.json") == problem
        assert decode_problem(encode_problem(problem)) == problem


def test_the_file_has_the_fields_that_it_always_had(tmp_path: Path) -> None:
    write_problem(tmp_path / "setup.json", changed(2))
    document = json.loads((tmp_path / "setup.json").read_text())
    assert list(document) == [
        *("model", "layout", "profile", "packing", "cluster", "budget_s", "seed", "method", "strategies", "tuning"),
        *("backend", "split_backward", "held_copies", "search", "threads"),
    ]
    assert document["cluster"]["memory_capacity_bytes"] == 10**6
    assert document["held_copies"] == {"lm/block": 2.5}


def test_memory_other_than_the_cluster_s_is_written(tmp_path: Path) -> None:
    limited = replace(random_problem(2), memory=MemoryLimit(123))
    write_problem(tmp_path / "setup.json", limited)
    assert read_problem(tmp_path / "setup.json").memory == limited.memory


def test_what_a_file_cannot_hold_is_refused() -> None:
    problem = random_problem(2)
    for other, message in (
        (problem.corrected(Correction({"lm": (2.0, 2.0)})), "costs: are corrected"),
        (problem.with_reserve([5] * problem.layout.num_ranks), "memory: has a reserve"),
        (replace(problem, memory=MemoryLimit(num_messages=0)), "memory: has a reserve"),
        (replace(problem, costs=UnknownCosts()), "costs: are UnknownCosts, which cannot be written"),
    ):
        with pytest.raises(InputError, match=message):
            encode_problem(other)
        with pytest.raises(InputError, match=message):
            Planner(other, MemoryStore)


class UnknownCosts:
    split_backward, strategies = False, ("keep",)


def test_a_message_of_another_model_is_refused() -> None:
    data = encode_problem(random_problem(2))
    with pytest.raises(PlannerError, match=r"profile\.layers\['ln/block'\]: is missing"):
        decode_problem(data.replace(b"\xa4name\xa2lm", b"\xa4name\xa2ln", 1))


def test_corrections_reserves_and_searches_keep_the_tables_of_the_recurrence() -> None:
    base = random_problem(3)
    layout = encoder_first(base.model, 2, lambda *_: 1.0)
    problem = replace(base, layout=layout, packing=PackingSpec(64))
    assert problem.pipeline is not None
    for other in (
        problem.corrected(Correction({"lm": (2.0, 2.0)})),
        problem.with_reserve([5, 5]),
        problem.with_search(seed=4, method="portfolio"),
        problem.with_search(problem.search.fast()),
    ):
        assert other.pipeline is problem.pipeline
    assert problem.with_search(seed=4).seed == 4
    more = replace(problem, packing=PackingSpec(128))
    assert more.pipeline is not problem.pipeline


def test_the_deprecated_names_make_problems() -> None:
    problem = random_problem(2)
    profile = problem.profile_costs.profile
    setup = Setup(problem.model, problem.layout, profile, problem.packing, budget_s=0.05, seed=2)
    assert setup.problem() == problem
