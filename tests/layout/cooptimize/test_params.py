"""What tunes the joint search: read from TOML, refused where it makes no sense, and obeyed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pipeloom.errors import InputError
from pipeloom.io import read_spec
from pipeloom.layout.cooptimize import CooptimizeParams, chain_of_layers, cooptimize
from pipeloom.layout.cooptimize.params import WalkPhase
from pipeloom.search import Budget
from tests.layout.cooptimize.chains import table


def read(folder: Path, text: str) -> CooptimizeParams:
    path = folder / "params.toml"
    path.write_text(text)
    return read_spec(path, CooptimizeParams)


def test_a_file_sets_some_and_leaves_the_rest(tmp_path: Path) -> None:
    params = read(
        tmp_path,
        """
        walks = 2
        tuned = ["partition", "schedule"]
        [[phases]]
        kind = "refine"
        until = 1.0
        [annealing]
        hot = 0.01
        [move_weights]
        "cut a chunk" = 0
        """,
    )
    assert params.walks == 2
    assert params.tuned == ("partition", "schedule")
    assert params.phases == (WalkPhase(kind="refine", until=1.0),)
    assert (params.annealing.hot, params.annealing.cold) == (0.01, CooptimizeParams().annealing.cold)
    assert params.move_weights == {"cut a chunk": 0.0}
    assert read(tmp_path, "") == CooptimizeParams()


def test_all_defaults_survive_a_file(tmp_path: Path) -> None:
    assert read(tmp_path, msgspec.toml.encode(CooptimizeParams()).decode()) == CooptimizeParams()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("walk = 2", "params.toml: walk: is not a known field; did you mean walks?"),
        ("walks = 0", "params.toml: walks: 0 is below 1"),
        ("walks = 1.5", "params.toml: walks: 1.5 is not an integer"),
        ("phases = []", "params.toml: phases: are none"),
        ('tuned = ["order"]', "params.toml: tuned: 'order' is unknown"),
        ("[annealing]\nhot = 0.1\ncold = 0.2", "params.toml: annealing.cold: 0.2 is not between 0 and hot, 0.1"),
        ("[starts]\nbudget_share = 2", "params.toml: starts.budget_share: 2 is above 1"),
        ("[refining]\nheat = 0.0", "params.toml: refining.heat: 0 is not positive"),
        ("[move_weights]\nhop = 1", "params.toml: move_weights.hop: is no move"),
    ],
)
def test_nonsense_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_moves_without_weight_are_not_made() -> None:
    params = CooptimizeParams(move_weights={"cut a chunk": 0.0, "wait": 0.0})
    found = cooptimize(chain_of_layers(table(5, 12, 3, 5)), budget=Budget(evaluations=2000), params=params)
    assert found.moves["cut a chunk"] == found.moves["wait"] == (0, 0, 0)
    assert found.moves["shift a key"][0] > 0


@pytest.mark.parametrize("kinds", [("refine",), ("anneal",), ("refine", "anneal")])
def test_phases_run_in_any_order(kinds: tuple[str, ...]) -> None:
    phases = tuple(WalkPhase(kind=kind, until=(i + 1) / len(kinds)) for i, kind in enumerate(kinds))  # type: ignore[arg-type]
    chain = chain_of_layers(table(7, 12, 3, 6))
    found = cooptimize(chain, budget=Budget(evaluations=4000), params=CooptimizeParams(phases=phases))
    assert found.lower_bound.ns <= found.timeline.makespan_ns <= min(report.start_ns for report in found.reports)
