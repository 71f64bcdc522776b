"""One table of systems: who adds to it adds to the comparison, and the page that lists the names has all of them."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest

from pipeloom.compare import registry
from pipeloom.compare.baselines.megatron import megatron_1f1b
from pipeloom.compare.chosen_layout import choose_layout
from pipeloom.compare.comparison import compare_setting
from pipeloom.compare.iterations import Grouping, Iterations, sampled_iterations
from pipeloom.compare.model_on_cluster import ModelOnCluster, draw_iteration, put_on_cluster
from pipeloom.compare.registry import BASELINES, Baseline, suitable
from pipeloom.integrations.models import load_model
from pipeloom.search import Budget
from pipeloom.spec import Sample
from pipeloom.spec.parallelism import Degrees
from tests.compare.cases import vlm_on_h800

PAGE = Path(__file__).parents[2] / "docs" / "compare.md"


def _on_cluster(model: str) -> ModelOnCluster:
    return put_on_cluster(model, "dip-h800-64", Degrees(tensor=2, pipeline=2))


def test_a_system_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = _on_cluster("vlm-7b")
    before = suitable(setting)
    monkeypatch.setitem(BASELINES, "mine", Baseline("Mine, as an example", megatron_1f1b))
    monkeypatch.setitem(BASELINES, "never", Baseline("Suits nothing", megatron_1f1b, lambda _model: False))
    assert suitable(setting) == (*before, "mine")
    reported: list[str] = []
    compared = list(
        compare_setting(
            setting,
            Iterations([draw_iteration(setting, 3, 100)], draw_iteration(setting, 3, 0)),
            ["1f1b", "mine"],
            budget=Budget(evaluations=1),
            on_system=reported.append,
        )
    )
    assert [one.title for one in compared] == reported == [BASELINES["1f1b"].title, "Mine, as an example"]
    theirs, mine = (one.result for one in compared)
    assert theirs is not None
    assert mine is not None
    assert mine.name == "Mine, as an example"
    assert mine.iteration_s == theirs.iteration_s


def test_systems_that_pack_samples_themselves_do_not_pad() -> None:
    """Neither the iteration nor those on which they choose their layouts, whatever the padding of the current run."""
    setting = vlm_on_h800(Degrees(tensor=2, pipeline=2), vision=4, lm=4)
    plain, padded = (
        sampled_iterations(setting, None, Grouping(4, samples=2, pad_to=pad_to), 0) for pad_to in (None, 9000)
    )
    assert padded.real == plain
    assert [name for name, entry in BASELINES.items() if entry.packs_samples] == ["megascale-omni", "dynapipe"]
    names = ["1f1b", "dynapipe"]
    theirs, same = (
        {one.name: one for one in compare_setting(setting, each, names, budget=Budget(evaluations=1))}
        for each in (plain, padded)
    )
    times = {name: [each[name].result.iteration_s for each in (theirs, same)] for name in names}  # type: ignore[union-attr]
    assert times["1f1b"][0] < times["1f1b"][1]
    assert times["dynapipe"][0] == times["dynapipe"][1]
    assert theirs["dynapipe"].layout == same["dynapipe"].layout


def test_titles_tell_systems_apart() -> None:
    assert len({entry.title for entry in BASELINES.values()}) == len(BASELINES)


@pytest.mark.parametrize(
    ("model", "missing"),
    [
        ("vlm-7b", set()),
        ("t2v-s", {"optimus", "optimus-fine", "megascale-omni"}),  # text before videos
        ("dit-5b", {"optimus", "optimus-fine", "megascale-omni"}),  # one module
    ],
)
def test_optimus_wants_encoders(model: str, missing: set[str]) -> None:
    assert set(BASELINES) - set(suitable(_on_cluster(model))) == missing


def test_the_page_lists_every_system() -> None:
    _, _, page = PAGE.read_text().partition("## The baselines")
    first_cells = re.findall(r"^\| (`[^|]*`) \|", page.partition("## ")[0], re.MULTILINE)
    listed = [name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)]
    assert sorted(listed) == sorted(BASELINES)


IMAGE = Sample("image", 40, (392,), (1568,))
PICTURE = Sample("picture", 0, (98,), (392,))
TEXT = Sample("text", 900)


@pytest.mark.full
@pytest.mark.parametrize(
    "groups", [[[TEXT, TEXT], [TEXT], [TEXT]], [[IMAGE, IMAGE, IMAGE], [TEXT], [PICTURE]]], ids=["texts", "uneven"]
)
def test_no_system_is_ended_by_what_samples_lack(
    groups: list[list[Sample]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = json.loads((PAGE.parents[1] / "examples" / "compare" / "config.json").read_text())
    config["num_hidden_layers"], config["vision_config"]["depth"] = 4, 4
    (tmp_path / "config.json").write_text(json.dumps(config))
    quick = functools.partial(choose_layout, trial=Budget(evaluations=2), rounds=1)
    monkeypatch.setattr(registry, "choose_layout", quick)
    setting = put_on_cluster(load_model(str(tmp_path)), "h100-8", Degrees(pipeline=2, data=4))
    found = compare_setting(setting, Iterations([groups], groups), list(BASELINES), budget=Budget(evaluations=2))
    assert [one.problem for one in found if not one.can_run] == []
