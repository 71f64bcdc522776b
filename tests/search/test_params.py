"""Parameters of the search: validated where they are made, read from files, and heeded."""

from __future__ import annotations

import msgspec
import pytest

from pipeloom.errors import InputError
from pipeloom.io import read_spec
from pipeloom.search import Budget, SearchParams, solve
from pipeloom.search.params import OrderParams, StaticOrderParams, StrategyParams
from pipeloom.timeline import check
from pipeloom_instances import family, generate


def test_a_file_names_only_what_it_changes(tmp_path):
    file = tmp_path / "params.toml"
    file.write_text("[orders]\nheat = 1\n[strategies]\nrounds = 60\n")
    params = read_spec(file, SearchParams)
    assert (params.orders.heat, params.strategies.rounds) == (1.0, 60)
    assert params.orders.most_heat == OrderParams().most_heat
    assert params.turns == SearchParams().turns


def test_parameters_survive_a_message():
    params = SearchParams(static_orders=StaticOrderParams(late_parts=(0.5,)), orders=OrderParams(heat=0.3))
    assert msgspec.json.decode(msgspec.json.encode(params), type=SearchParams) == params


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[orders]\nfar_share = 1.5\n", "orders.far_share: 1.5 is above 1"),
        ("[orders]\nfar = 0.5\n", "orders.far: 0.5 is below 1"),
        ("[justification]\npasses = 0\n", "justification.passes: 0 is below 1"),
        ("[assignment]\neven_share = 0.1\n", "assignment.even_share: 0.1 is before first_share, 0.35"),
        ("[orders]\nheta = 1.0\n", "heta"),
        ("[order]\n", "order"),
    ],
)
def test_what_is_no_parameter_is_refused(tmp_path, text, words):
    file = tmp_path / "params.toml"
    file.write_text(text)
    with pytest.raises(InputError) as refused:
        read_spec(file, SearchParams)
    assert words in str(refused.value)
    assert "params.toml" in str(refused.value)


def test_the_search_heeds_them():
    """Few rounds for the strategies, no late ends, another first temperature: another search, as feasible."""
    graph = generate(family("vlm-s", num_microbatches=6, memory=1.5, strategies=True), 0)
    params = SearchParams(strategies=StrategyParams(rounds=1, rollout_rounds=1))
    found = [solve(graph, budget=Budget(evaluations=120), seed=0, params=each) for each in (SearchParams(), params)]
    assert all(check(graph, each.schedule) == () for each in found)
    assert found[0].schedule.candidate.tolist() != found[1].schedule.candidate.tolist()
