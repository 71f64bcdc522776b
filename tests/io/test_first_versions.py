"""Files of the first version of each format are read, and written again byte for byte (docs/formats.md)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import pipeloom
from pipeloom.errors import InputError
from pipeloom.io import (
    read_layout,
    read_schedule,
    write_batches,
    write_instance,
    write_layers,
    write_layout,
    write_rule,
    write_samples,
    write_schedule,
)
from pipeloom.io.document import to_document
from pipeloom.plan import to_text

STORED = Path(__file__).with_name("first_versions")


def _write_schedule(path: Path, _: Any) -> None:
    graph, stated = pipeloom.read_instance(STORED / "instance.json"), read_schedule(STORED / "schedule.json")
    timeline = pipeloom.simulate(graph, stated.schedule)
    write_schedule(path, graph, stated.schedule, timeline, stated.lower_bound, stated.search)


WRITERS: dict[str, Callable[[Path, Any], object]] = {
    "batches.json": write_batches,
    "instance.json": write_instance,
    "layers.json": write_layers,
    "layout.json": write_layout,
    "layout.rule.json": lambda path, rule: write_rule(path.with_name("layout.json"), rule),
    "plan.txt": lambda path, plan: path.write_text(to_text(plan)),
    "samples.jsonl": write_samples,
    "schedule.json": _write_schedule,
}
READ_ONLY = {"profile.json"}


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_file_is_read_and_written_again_byte_for_byte(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name, pipeloom.load(STORED / name))
    assert (tmp_path / name).read_text() == (STORED / name).read_text()


def test_every_stored_file_is_tested_and_read() -> None:
    stored = {path.name for path in STORED.iterdir()}
    assert stored == WRITERS.keys() | READ_ONLY
    assert all(pipeloom.load(STORED / name) is not None for name in stored)
    assert read_layout(STORED / "layout.json").digest == "8500d782"


@pytest.mark.parametrize("name", sorted(path.name for path in STORED.glob("*.json")))
def test_unknown_field_may_come_from_a_newer_version(name: str, tmp_path: Path) -> None:
    document = json.loads((STORED / name).read_text())
    for field, remedy in (("xyzzy", "otherwise remove it"), ("formats", "did you mean format?")):
        (tmp_path / name).write_text(json.dumps(document | {field: 1}))
        with pytest.raises(InputError, match=f"{field}: is not a known field; ") as caught:
            pipeloom.load(tmp_path / name)
        assert remedy in caught.value.remedy
        assert "pgrade Pipeloom if a newer version wrote the file" in caught.value.remedy


@pytest.mark.parametrize("name", sorted(path.name for path in STORED.glob("*.json")))
def test_newer_version_of_a_format_is_named(name: str, tmp_path: Path) -> None:
    document = json.loads((STORED / name).read_text())
    newer = document["format"].replace("/1", "/9")
    (tmp_path / name).write_text(json.dumps(document | {"format": newer}))
    with pytest.raises(InputError, match=f"format: '{newer}' is unknown; .*; upgrade Pipeloom if a newer version"):
        pipeloom.load(tmp_path / name)


def test_version_of_an_expected_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"format": "pipeloom.schedule/2"}')
    with pytest.raises(InputError, match=r"'pipeloom\.schedule/2' is not 'pipeloom\.schedule/1'; upgrade Pipeloom"):
        read_schedule(tmp_path / "s.json")


class _Item(msgspec.Struct):
    old: int = 0
    new: float = 0.0


class _File(msgspec.Struct):
    items: tuple[_Item, ...]
    old: int | None = None
    new: dict[str, int] = {}
    format: str = "a/1"


def test_later_fields_are_omitted_at_their_default() -> None:
    always: dict[type, tuple[str, ...]] = {_File: ("format", "old", "items"), _Item: ("old",)}
    plain = to_document(_File(items=(_Item(), _Item())), always)
    assert json.dumps(plain) == '{"format": "a/1", "old": null, "items": [{"old": 0}, {"old": 0}]}'
    used = to_document(_File(items=(_Item(new=0.5),), new={"a": 1}), always)
    assert json.dumps(used) == '{"format": "a/1", "old": null, "items": [{"old": 0, "new": 0.5}], "new": {"a": 1}}'
