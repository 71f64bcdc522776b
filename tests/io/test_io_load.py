"""`pipeloom.load` on everything: each format, and whatever a broken disk or a wrong hand may give it."""

from __future__ import annotations

import copy
import gzip
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipeloom
from pipeloom.errors import InputError
from pipeloom.io import (
    PackedBatches,
    ScheduleFile,
    check_writable,
    packed_batches,
    read_schedule,
    schedule_from_document,
    write_batches,
    write_layers,
    write_layout,
    write_samples,
    write_schedule,
    write_text,
)
from pipeloom.packing import Microbatch, Packing
from pipeloom.spec import Batch, Layout, Sample
from tests.io.documents import TINY, TINY_SCHEDULE, instances

LAYOUT = {
    "format": "pipeloom.layout/1",
    "num_ranks": 2,
    "parallelism": {"tensor": 4, "data": 1},
    "modules": [
        {"name": "vision", "after": [], "frozen": False, "sub_microbatch": 12, "on_ranks": "replicated"},
        {"name": "lm", "after": ["vision"], "frozen": False, "sub_microbatch": None, "on_ranks": "pipelined"},
    ],
    "chunks": [
        {"module": "vision", "layers": [0, 3], "rank": 0},
        {"module": "vision", "layers": [0, 3], "rank": 1},
        {"module": "lm", "layers": [0, 7], "rank": 0},
        {"module": "lm", "layers": [8, 9], "rank": 1},
    ],
}
LAYERS = {
    "format": "pipeloom.layers/1",
    "name": "two",
    "num_ranks": 2,
    "num_microbatches": 4,
    "boundary_s": 0.0002,
    "boundary_bytes": 33554432,
    "memory_capacity_bytes": None,
    "layers": [
        {
            "name": "a",
            "forward_s": 0.0033,
            "activation_bytes": 1000000,
            "parameter_bytes": 2000000,
            "backward_input_s": 0.0052,
            "backward_weight_s": 0.0036,
        },
        {
            "name": "b",
            "forward_s": 0.0033,
            "activation_bytes": 1000000,
            "parameter_bytes": 0,
            "backward_s": 0.01,
            "static_bytes": 7,
            "candidates": [{"strategy": "keep", "forward_s": 1.0, "activation_bytes": 40, "backward_s": 2.0}],
        },
    ],
}
ALL = {"instance": TINY, "schedule": TINY_SCHEDULE, "layout": LAYOUT, "layers": LAYERS}


def _load_text(folder: Path, text: str | bytes, name: str = "x.json") -> Any:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return pipeloom.load(path)


def _message(folder: Path, text: str | bytes, name: str = "x.json") -> str:
    with pytest.raises(InputError) as caught:
        _load_text(folder, text, name)
    message = str(caught.value)
    assert message.startswith(str(folder / name))
    assert "\n" not in message
    return message.removeprefix(str(folder / name) + ": ")


def test_layout_round_trip(tmp_path: Path) -> None:
    layout = _load_text(tmp_path, json.dumps(LAYOUT))
    assert isinstance(layout, Layout)
    write_layout(tmp_path / "y.json.gz", layout)
    assert json.loads(gzip.decompress((tmp_path / "y.json.gz").read_bytes())) == LAYOUT
    assert pipeloom.load(tmp_path / "y.json.gz") == layout


def test_layers_round_trip(tmp_path: Path) -> None:
    table = _load_text(tmp_path, json.dumps(LAYERS))
    write_layers(tmp_path / "y.json", table)
    assert json.loads((tmp_path / "y.json").read_text()) == LAYERS
    first, second = table.layers
    assert first.total_backward_s == pytest.approx(0.0088)
    assert first.held_bytes == 1_000_000 * 18
    assert (second.total_backward_s, second.held_bytes) == (0.01, 7)


def test_schedule_round_trip(tmp_path: Path) -> None:
    graph = _load_text(tmp_path, json.dumps(TINY))
    stated = _load_text(tmp_path, json.dumps(TINY_SCHEDULE))
    assert isinstance(stated, ScheduleFile)
    timeline = stated.timeline(graph)
    assert timeline is not None
    assert timeline.makespan_ns == 6_020_000_000 == stated.makespan_ns
    write_schedule(tmp_path / "y.json", graph, stated.schedule, timeline, stated.lower_bound, stated.search)
    assert json.loads((tmp_path / "y.json").read_text()) == TINY_SCHEDULE


def test_every_field_of_a_search_may_be_null(tmp_path: Path) -> None:
    graph = _load_text(tmp_path, json.dumps(TINY))
    record = dict.fromkeys(TINY_SCHEDULE["search"])
    stated = schedule_from_document(TINY_SCHEDULE | {"search": record})
    assert stated.schedule.method == ""
    timeline = stated.timeline(graph)
    assert timeline is not None
    write_schedule(tmp_path / "y.json", graph, stated.schedule, timeline, stated.lower_bound, stated.search)
    assert json.loads((tmp_path / "y.json").read_text())["search"] == record | {"method": ""}


def test_schedule_of_an_order_alone() -> None:
    stated = schedule_from_document({"format": "pipeloom.schedule/1", "instance": "tiny", "order": [[0, 3], [1, 2]]})
    assert stated.start_ns is None
    assert [tasks.tolist() for tasks in stated.schedule.order] == [[0, 3], [1, 2]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": [[0, -1]]}, "order[0][1]: -1 is negative"),
        ({"order": [[0, "a"]]}, "order[0][1]: 'a' is not an integer"),
        ({"order": None}, "order: null is not a list"),
        ({"start_s": [0.0, -1.0]}, "start_s[1]: -1 is negative"),
        ({"makespan_s": -1.0}, "makespan_s: -1 is negative"),
        ({"search": {"method": 3}}, "search.method: 3 is not a string"),
        ({"orders": []}, "orders: is not a known field; did you mean order?"),
        ({"peak_memory_bytes": [2**62]}, "peak_memory_bytes[0]: 4611686018427387904 is not below 2**62"),
    ],
)
def test_wrong_schedule_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert _message(tmp_path, json.dumps(TINY_SCHEDULE | change)).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_ranks": 0}, "num_ranks: 0 is below 1"),
        ({"parallelism": {"tensor": 0}}, "parallelism.tensor: 0 is below 1"),
        (
            {"chunks": [*LAYOUT["chunks"][:3], {"module": "lm", "layers": [9, 9], "rank": 1}]},
            "chunks[3].layers: begins at 9, layer 8 of 'lm' comes next",
        ),
        ({"modules": [{"name": "vision", "on_ranks": "split"}]}, "modules[0].on_ranks: 'split' is not one of"),
    ],
)
def test_wrong_layout_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert _message(tmp_path, json.dumps(LAYOUT | change)).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward_s": -1}, "layers[1].forward_s: -1 is negative"),
        ({"backward_input_s": 1.0}, "layers[1].backward_s: or both backward_input_s and"),
        ({"activation_bytes": "1"}, "layers[1].activation_bytes: '1' is not an integer"),
        ({"static_bytes": -3}, "layers[1].static_bytes: -3 is negative"),
    ],
)
def test_wrong_layers_are_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    layers = copy.deepcopy(LAYERS)
    layers["layers"][1] |= change
    assert _message(tmp_path, json.dumps(layers)).startswith(message)


def test_samples_round_trip_and_defaults(tmp_path: Path) -> None:
    line = '{"id": "a1", "text_tokens": 120, "image_tokens": [169, 169], "image_patches": [2704, 2704]}\n\n{"id": "b"}'
    samples = _load_text(tmp_path, line, "x.jsonl")
    assert samples[0].patches == (2704, 2704)
    assert samples[1] == Sample(id="b")
    write_samples(tmp_path / "y.jsonl.gz", samples)
    assert pipeloom.load(tmp_path / "y.jsonl.gz") == samples


def test_every_field_of_a_sample_is_written(tmp_path: Path) -> None:
    full = Sample(
        "a", 7, (4, 9), (16, 36), (1.5,), (224,), (448,), (2.25, 3.0), (60, 80), {"text_encoder": (77,), "x": ()}
    )
    assert all(getattr(full, field.name) != field.default for field in msgspec.structs.fields(Sample))
    samples = (full, Sample("b", image_patches=(), lengths={}), Sample("c"))
    write_samples(tmp_path / "s.jsonl", samples)
    assert pipeloom.load(tmp_path / "s.jsonl") == samples


def test_parquet_is_read_without_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends on an error while pyarrow's threads run may end in C++'s `terminate` instead."""
    parquet = pytest.importorskip("pyarrow.parquet")
    given: list[dict[str, Any]] = []

    def iter_batches(*_: Any, **options: Any) -> None:
        given.append(options)
        raise ValueError("no table")

    parquet.write_table(pytest.importorskip("pyarrow").table({"id": ["a"]}), tmp_path / "s.parquet")
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", iter_batches)
    with pytest.raises(InputError):
        pipeloom.load(tmp_path / "s.parquet")
    assert [options["use_threads"] for options in given] == [False]


def test_parquet_gives_the_same_samples_as_json_lines(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    rows = [
        {"id": "a", "text_tokens": 5, "image_tokens": [4, 9], "video_seconds": [1.5], "lengths": None},
        {"id": "b", "text_tokens": 7, "image_tokens": None, "video_seconds": []},
        {"id": "c", "lengths": {"text_encoder": [77], "audio": [5, 6]}},
        {"id": "d", "lengths": {"text_encoder": [12]}},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "s.parquet")
    lines = "\n".join(json.dumps({k: v for k, v in row.items() if v is not None}) for row in rows)
    assert pipeloom.load(tmp_path / "s.parquet") == _load_text(tmp_path, lines, "s.jsonl")
    # Writers that know no structs with varying fields write maps.
    lengths = pyarrow.map_(pyarrow.string(), pyarrow.list_(pyarrow.int64()))
    names = {name: pyarrow.array([row.get(name) for row in rows]) for name in ("id", "text_tokens", "image_tokens")}
    names["video_seconds"] = pyarrow.array([row.get("video_seconds") for row in rows])
    pairs = [list(row["lengths"].items()) if row.get("lengths") else None for row in rows]
    names["lengths"] = pyarrow.array(pairs, lengths)
    pyarrow.parquet.write_table(pyarrow.table(names), tmp_path / "m.parquet")
    assert pipeloom.load(tmp_path / "m.parquet") == pipeloom.load(tmp_path / "s.parquet")
    twice = pyarrow.array([[("a", [1]), ("b", [2]), ("b", [3])]], lengths)
    pyarrow.parquet.write_table(pyarrow.table({"id": ["a"], "lengths": twice}), tmp_path / "m.parquet")
    with pytest.raises(InputError, match=r"m.parquet: row 1: lengths: has the key 'b' twice; give each key once"):
        pipeloom.load(tmp_path / "m.parquet")
    assert _message(tmp_path, b"PAR1 and then nothing", "t.parquet") == "is not a readable Parquet file"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": "a"}\n{"id": "a"}', "line 2: id: 'a' is also in line 1"),
        ('{"id": "a"}\n{"id": 3}', "line 2: id: 3 is not a string"),
        ('{"id": "a", "text_tokens": -1}', "line 1: text_tokens: -1 is negative"),
        ('{"id": "a", "image_tokens": [0]}', "line 1: image_tokens[0]: 0 is below 1"),
        ('{"id": "a", "image_token": [1]}', "line 1: image_token: is not a known field; did you mean image_tokens?"),
        ('{"id": "a"', "line 1: is not valid JSON"),
        ("", "has no sample"),
    ],
)
def test_wrong_samples_are_named(text: str, message: str, tmp_path: Path) -> None:
    assert _message(tmp_path, text, "x.jsonl").startswith(message)


def test_batches_hold_ids_and_totals(tmp_path: Path) -> None:
    samples = tuple(
        Sample(id=c, text_tokens=i, image_tokens=(3,) * i, image_patches=(5,) * i) for i, c in enumerate("abc")
    )
    packing = Packing(Batch(samples, 7), ("lm",), (Microbatch((2, 0), ((),)), Microbatch((1,), ((),))))
    write_batches(tmp_path / "b.json", packed_batches([packing], "token budget"))
    loaded = pipeloom.load(tmp_path / "b.json")
    assert isinstance(loaded, PackedBatches)
    first, second = loaded.batches[0].microbatches
    assert (first.samples, first.text_tokens, first.image_tokens, first.image_patches) == (("c", "a"), 2, 6, 10)
    assert (second.samples, second.num_samples, second.num_images) == (("b",), 1, 1)
    document = json.loads((tmp_path / "b.json").read_text())
    document["batches"][0]["microbatches"][1]["samples"] = ["c"]
    expected = "batches[0].microbatches[1].samples[0]: 'c' occurs twice in the batch"
    assert _message(tmp_path, json.dumps(document)) == expected


BROKEN = [
    ("", "is empty"),
    ("[1]", "is a list, not a JSON object"),
    ("null", "is null, not a JSON object"),
    ("3", "is a number, not a JSON object"),
    ("{}", "format: is missing"),
    ('{"format": 3}', "format: 3 is unknown"),
    ('{"format": "pipeloom.instance/1"', "is not valid JSON: expecting ',' delimiter (line 1, column 33)"),
    ('{"format": "pipeloom.instance/1", "name": "a", "name": "b"}', "name: is given twice in one object"),
    ('{"a": [{}, {"b": {"c": 1, "c": 1}}]}', "a[1].b.c: is given twice in one object"),
    ('{"a": [1, NaN]}', "a[1]: nan is not a finite number"),
    ('{"a": {"b": -Infinity}}', "a.b: -inf is not a finite number"),
    ('{"a": [1e999]}', "a[0]: inf is not a finite number"),
    ('{"a": ' + "9" * 5000 + "}", "has a number with too many digits"),
    ('{"a": ' + "9" * 400 + ".0}", "a: inf is not a finite number"),
    ('{"a": [0.1234567890123456789, 9223372036854775808]}', "a[1]: 9223372036854775808 does not fit in 64 bits"),
    (
        '{"format": "pipeloom.layout/1", "num_ranks": 4000000000000000000, "chunks": [],'
        '"modules": [{"name": "v", "on_ranks": "replicated"}]}',
        "num_ranks: 4000000000000000000 is above 4096",
    ),
    ('{"a": "\\ud800"}', "a: has a lone surrogate"),
    ('{"a": ' * 100000, "is nested too deeply"),
    ('{"a": ' + "[" * 990 + "NaN" + "]" * 990 + "}", ("is nested too deeply", "a[0][0]")),
    (b"\xff\xfe\x00", "is not UTF-8 text (byte 0)"),
    (b"\x80\x04\x95", "is not UTF-8 text (byte 0)"),
    (bytes(range(32)), "is not valid JSON"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN, ids=[str(m)[:40] for _, m in BROKEN])
def test_broken_file_gives_one_line(text: str | bytes, message: str, tmp_path: Path) -> None:
    assert _message(tmp_path, text).startswith(message)


def test_broken_gzip(tmp_path: Path) -> None:
    whole = gzip.compress(json.dumps(TINY).encode())
    for data in (whole[:40], b"plain text", b"", whole[:-3], whole[:60] + b"\0\0\0\0" + whole[64:]):
        assert _message(tmp_path, data, "x.json.gz") in (
            "is not a whole gzip file; write it again, or drop .gz from its name",
            "is empty",
        )


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "a\0b", str(tmp_path / ("x" * 400)), "\udcff"):
        with pytest.raises(InputError, match="cannot be read"):
            pipeloom.load(path)


def test_file_above_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeloom.io.files.MAX_FILE_BYTES", 1000)
    assert _message(tmp_path, gzip.compress(b" " * 10**6), "bomb.json.gz").startswith("is larger than 1000 bytes")


def check_one_line(path: Path) -> None:
    """Load, or refuse in one printable line that begins with the file."""
    message = ""
    try:
        pipeloom.load(path)
    except InputError as error:
        message = str(error)
    assert not message or message.startswith(str(path))
    assert "\n" not in message
    message.encode("utf-8")


def _mutate(draw: st.DrawFn, node: Any) -> Any:
    """Replace, drop, double or add something at a random place of a document."""
    junk = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=5),
        st.just([]),
        st.just({}),
        st.sampled_from([-1, 2**63, 2**64, 1e300, 10**400, [[]], [None], "F", "\ud800", "pipeloom.instance/1"]),
    )
    if isinstance(node, dict) and node and draw(st.integers(0, 9)) < 9:
        key = draw(st.sampled_from(sorted(node)))
        action = draw(st.integers(0, 11))
        if action == 0:
            return {k: v for k, v in node.items() if k != key}
        if action == 1:
            return node | {draw(st.text(max_size=4)): draw(junk)}
        return node | {key: _mutate(draw, node[key])}
    if isinstance(node, list) and node and draw(st.integers(0, 9)) < 9:
        i = draw(st.integers(0, len(node) - 1))
        action = draw(st.integers(0, 5))
        if action == 0:
            return node[:i] + node[i + 1 :]
        if action == 1:
            return [*node, node[i]]
        return [*node[:i], _mutate(draw, node[i]), *node[i + 1 :]]
    return draw(junk)


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    document = draw(st.sampled_from(sorted(ALL.values(), key=lambda d: str(d["format"]))) | instances())
    for _ in range(draw(st.integers(1, 3))):
        document = _mutate(draw, document)
    return document


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(document=mutated())
def test_mutated_documents_load_or_give_one_line(document: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated.json"
    path.write_text(json.dumps(document))
    check_one_line(path)


@given(
    data=st.binary(max_size=200),
    suffix=st.sampled_from(["json", "json.gz", "jsonl", "parquet"]),
    cut=st.none() | st.tuples(st.sampled_from(sorted(ALL)), st.integers(0, 400)),
)
def test_random_and_truncated_bytes_give_one_line(
    data: bytes, suffix: str, cut: tuple[str, int] | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / f"random.{suffix}"
    if cut is not None:
        data = json.dumps(ALL[cut[0]]).encode()[: cut[1]] + data
    path.write_bytes(data)
    check_one_line(path)


def test_writing_replaces_whole_files_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    target.write_text("old")
    link = tmp_path / "link.json"
    link.symlink_to(target)
    write_text(link, "new")
    assert target.read_text() == "new"
    assert link.is_symlink()
    assert {p.name for p in tmp_path.iterdir()} == {"a.json", "link.json"}
    umask = os.umask(0)
    os.umask(umask)
    assert target.stat().st_mode & 0o777 == 0o666 & ~umask


def test_interrupted_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.json"
    target.write_text("old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_text(target, "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.json", "old")]


def test_targets_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for target, problem in [
        (tmp_path, "is a directory"),
        (tmp_path / "none" / "a.json", "folder does not exist"),
        (tmp_path / "file" / "a.json", "folder does not exist"),
        (str(tmp_path / ("x" * 300)), "too long"),
        (str(tmp_path / "a\0b"), "null byte"),
        ("", "is a directory"),
    ]:
        for write in (lambda path: write_text(path, "new"), check_writable):
            with pytest.raises(InputError, match=problem):
                write(target)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_devices_are_written_to_and_not_replaced() -> None:
    write_text("/dev/null", "gone")
    assert Path("/dev/null").is_char_device()
    check_writable("/dev/null")


def test_reading_states_the_file_of_a_schedule(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps(TINY_SCHEDULE | {"start_s": [0.0]}))
    (tmp_path / "i.json").write_text(json.dumps(TINY))
    graph = pipeloom.read_instance(tmp_path / "i.json")
    with pytest.raises(InputError, match="start_s: has 1 entries, the instance has 4 tasks"):
        read_schedule(path).timeline(graph)
