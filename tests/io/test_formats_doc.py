"""docs/formats.md shows real files: each example is read, and those of one problem answer each other."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

import pipeloom
from pipeloom.cli.app import run
from pipeloom.cost.layers import LayerCost, LayerTable
from pipeloom.io import batches, instance, instance_document, rule, schedule, schedule_document
from pipeloom.plan import Verb, from_text, to_text, verify
from pipeloom.search.params import SearchParams
from pipeloom.spec import ModelSpec, RankSpec
from tests.io.documents import TINY, TINY_SCHEDULE

DOC = Path(__file__).parents[2] / "docs" / "formats.md"
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", DOC.read_text(), re.DOTALL)
JSON = [text for language, text in BLOCKS if language == "json"]
FORMATS = {json.loads(text)["format"]: text for text in JSON if '"format"' in text}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_example_loads(name: str, tmp_path: Path) -> None:
    path = tmp_path / "example"
    path.write_text(FORMATS[name])
    assert pipeloom.load(path) is not None


def test_every_format_has_an_example() -> None:
    names = {"instance", "schedule", "layout", "rule", "layers", "batches", "profile"}
    assert set(FORMATS) == {f"pipeloom.{name}/1" for name in names}


def test_example_schedule_answers_the_example_instance(tmp_path: Path) -> None:
    instance, schedule = tmp_path / "i.json", tmp_path / "s.json"
    instance.write_text(FORMATS["pipeloom.instance/1"])
    schedule.write_text(FORMATS["pipeloom.schedule/1"])
    assert run(["check", str(instance), str(schedule)]) == 0
    graph = pipeloom.read_instance(instance)
    assert instance_document(graph) == json.loads(instance.read_text()) == TINY
    stated = pipeloom.read_schedule(schedule)
    timeline = pipeloom.simulate(graph, stated.schedule)
    written = schedule_document(graph, stated.schedule, timeline, stated.lower_bound, stated.search)
    assert written == json.loads(schedule.read_text())
    assert written | {"search": None} == TINY_SCHEDULE | {"search": None}


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("instance", (instance._Instance, instance._Tasks, instance._Pairs, instance._Edges)),
        ("schedule", (schedule._ScheduleFile, schedule.SearchRecord)),
        ("layers", (LayerTable, LayerCost)),
        ("rule", tuple(rule._ALWAYS_WRITTEN)),
        ("batches", tuple(batches._ALWAYS_WRITTEN)),
    ],
)
def test_every_field_of_a_format_is_in_its_section(name: str, kinds: tuple[Any, ...]) -> None:
    section = DOC.read_text().partition(f"\n## `pipeloom.{name}/1`")[2].partition("\n## ")[0]
    words = set(re.findall(r"\w+", section))
    assert {field for kind in kinds for field in kind.__struct_encode_fields__} <= words


def test_example_sample_and_candidates() -> None:
    sample = next(json.loads(text) for text in JSON if '"text_tokens": 120' in text)
    assert pipeloom.spec.batch_from_dicts([sample]).samples[0].patches == (2704, 2704)
    document = json.loads(json.dumps(TINY))
    document["pairs"]["candidates"] = [next(json.loads(t) for t in JSON if t.startswith("["))] * 2
    assert pipeloom.io.instance_from_document(document).candidates is not None


def test_example_plan_is_proved_and_every_verb_is_reported() -> None:
    text = next(text for language, text in BLOCKS if not language and text.startswith("pipeloom.plan/2"))
    plan = from_text(text)
    verify(plan)
    assert to_text(plan) == text
    reported = set(re.findall(r"`([A-Z_]+)`", DOC.read_text()))
    assert set(Verb) <= reported


def test_example_specs() -> None:
    model, cluster, params = (tomllib.loads(text) for language, text in BLOCKS if language == "toml")
    assert msgspec.convert(model, ModelSpec).module("lm").after == ("vision",)
    assert msgspec.convert(cluster, RankSpec).memory_capacity_bytes == 2_000_000_000
    assert msgspec.convert(params, SearchParams).orders.heat == 0.2


def test_error_lines_are_the_real_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = next(text for _, text in BLOCKS if "did you mean" in text).replace("  tiny", "tiny").splitlines()
    path = tmp_path / "tiny.json"
    for field, value, line in (("duration_s", [1.0] * 17 + [-0.2], shown[0]), ("durations_s", [1.0], shown[1])):
        path.write_text(json.dumps(TINY | {"tasks": TINY["tasks"] | {field: value}}))
        assert run(["check", str(path), str(path)]) == 2
        assert capsys.readouterr().err.strip().endswith(line.strip())
