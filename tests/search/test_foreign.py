"""`solve` and `check` on files that others made."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pipeloom.cli.app import run
from pipeloom.errors import InfeasibleError
from pipeloom.io import read_instance, read_schedule
from pipeloom.io.instance import instance_from_document
from pipeloom.search import Budget, solve
from pipeloom.timeline import check
from tests.search.foreign import foreign_document
from tests.search.methods import SEARCHES


def attack(seed, method, evaluations, room=None):
    """Solve one file as it comes; the checker accepts, and no bound is above the makespan."""
    graph = instance_from_document(json.loads(json.dumps(foreign_document(seed, room=room))))
    found = solve(graph, budget=Budget(evaluations=evaluations), seed=seed, method=method)
    assert check(graph, found.schedule, found.timeline) == ()
    assert found.lower_bound.ns <= found.timeline.makespan_ns
    return graph


def test_foreign_files_are_solved_and_pass_the_check():
    graphs = [attack(seed, "default", 40) for seed in range(120)]
    # The generator is worth something only if all of this is really among them.
    assert any(g.candidates is not None for g in graphs)
    assert any((g.weight_of >= 0).any() for g in graphs)
    assert any((g.backward_of < 0).any() for g in graphs)
    assert any((g.duration_ns == 0).any() for g in graphs)
    assert any((g.edge_bytes > 0).any() for g in graphs)
    assert any((g.edge_delay_ns > 0).any() for g in graphs)
    assert any(len(np.unique(g.rank)) < g.num_ranks for g in graphs)


@pytest.mark.parametrize("method", [m for m in SEARCHES if m != "default"])
def test_foreign_files_under_every_method(method):
    for seed in range(200, 220):
        attack(seed, method, 30)


@pytest.mark.soak
def test_many_foreign_files():
    for seed in range(1000, 1600):
        attack(seed, "default" if seed % 2 else "mcts", 60, room=(None, 1.0, 1.5)[seed % 3])


@pytest.mark.parametrize(("seed", "room"), [(129, None), (1453, 1.0)])
def test_an_order_that_fits_is_found_where_the_plain_ones_do_not_fit(seed, room):
    """Both were refused: neither depth first nor the least rise fits, though the order of the file does."""
    attack(seed, "default", 20, room)


@pytest.mark.parametrize(
    ("seed", "evaluations", "room"),
    [
        pytest.param(1497, 20, None, id="no task takes time"),
        pytest.param(1505, 60, 1.5, id="some microbatches have no backward"),
    ],
)
def test_what_once_failed(seed, evaluations, room):
    attack(seed, "default", evaluations, room)


def test_what_cannot_fit_is_refused_with_the_pair_and_the_bytes():
    refused = 0
    for seed in range(60):
        document = foreign_document(seed, room=1.0)
        sizes = document["pairs"]["activation_bytes"]
        pair = int(np.argmax(sizes))
        if document["pairs"]["candidates"] or sizes[pair] < 2:
            continue
        rank = document["tasks"]["rank"][document["tasks"]["pair"].index(pair)]
        static = document["memory_static_bytes"][rank]
        document["memory_capacity_bytes"][rank] = static + sizes[pair] - 1
        graph = instance_from_document(document)
        with pytest.raises(InfeasibleError) as caught:
            solve(graph, budget=Budget(evaluations=5), seed=0)
        message = str(caught.value)
        assert "pair " in message
        assert f"rank {rank}" in message
        assert f"{static} static bytes" in message
        assert str(sizes[pair] - 1) in message
        refused += 1
    assert refused >= 15


def test_through_the_command_line(tmp_path, capsys):
    for seed in (3, 5, 8):
        file, answer = tmp_path / f"{seed}.json", tmp_path / f"{seed}.schedule.json"
        file.write_text(json.dumps(foreign_document(seed)))
        assert run(["solve", str(file), "--budget", "0.1", "--out", str(answer)]) == 0
        assert run(["check", str(file), str(answer)]) == 0
        graph, stated = read_instance(file), read_schedule(answer)
        assert check(graph, stated.schedule) == ()
    assert "feasible" in capsys.readouterr().out
