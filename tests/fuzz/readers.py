"""Every reader of what comes from outside: how it is called, valid inputs, and what may be made of those."""

from __future__ import annotations

import io
import json
import re
import tarfile
import wave
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet
import tomli_w
import torch
import torch.distributed.checkpoint as dcp

import pipeloom
from pipeloom.cost import Profile
from pipeloom.emulator import count_parameters
from pipeloom.explain.traces.read import read_run
from pipeloom.integrations.configs import check_config, zoo_model
from pipeloom.integrations.configs import read_config as read_model_config
from pipeloom.integrations.current_runs import load_run
from pipeloom.integrations.data.blobs import Blob
from pipeloom.integrations.data.processors import decode_wave
from pipeloom.integrations.data.sources import Shards
from pipeloom.integrations.megatron import read_megatron
from pipeloom.io import instance_document, instance_from_document, read_spec
from pipeloom.io.megatron_log import read_megatron_log
from pipeloom.io.stage_names import megatron_stages
from pipeloom.packing import packing_from_counts
from pipeloom.plan import Answer, check_shapes, from_text, to_text, verify
from pipeloom.plan.text import from_msgpack, to_msgpack
from pipeloom.planner import PlanningProblem, read_problem
from pipeloom.planner.messages import Request, answer_of, decode, encode
from pipeloom.planner.planning import plan_batch
from pipeloom.planner.problem_file import ProblemFile, decode_problem, encode_problem
from pipeloom.runtime.checkpoint.digests import PlainReader, find_damage, write_digests
from pipeloom.runtime.checkpoint.safetensors_files import TensorFiles
from pipeloom.runtime.launch.store import TcpPlanStore
from pipeloom.search import Budget, SearchParams
from pipeloom.spec import ModelSpec, RankSpec
from pipeloom.spec.catalog import load_architecture, load_cluster, load_device, names
from pipeloom.taskgraph import TaskGraph
from pipeloom.training.config import read_config
from pipeloom.training.record import read_history
from tests.cases import random_batch
from tests.explain.traces.made import documents, random_pipeline
from tests.explain.traces.test_megatron_log import log
from tests.integrations.megatron.cases import listed
from tests.io.test_formats_doc import BLOCKS, FORMATS
from tests.planner.cases import random_problem

from .mutations import Mutator, change_bytes, change_json, change_lines, change_msgpack, change_words

ROOT = Path(__file__).parents[2]
ZOO = ROOT / "src" / "pipeloom" / "spec" / "zoo"


@dataclass(frozen=True)
class Reader:
    """Reads a file of some name, which begins as one of the examples.

    What `read` returns has been accepted: it raises AssertionError where that is wrong.
    """

    read: Callable[[Path], object]
    name: str
    examples: Callable[[], list[bytes]]
    mutators: tuple[Mutator, ...]


# ------------------------------------------------------------------ what is accepted


def _load(path: Path) -> None:
    found = pipeloom.load(path)
    if isinstance(found, TaskGraph):
        document = instance_document(found)
        assert instance_document(instance_from_document(json.loads(json.dumps(document)))) == document


def _plan_text(path: Path) -> None:
    plan = pipeloom.load(path)
    assert from_text(to_text(plan)) == plan
    assert from_msgpack(to_msgpack(plan)) == plan
    verify(plan)


def _schedule(path: Path) -> None:
    graph = instance_from_document(json.loads(FORMATS["pipeloom.instance/1"]))
    stated = pipeloom.read_schedule(path)
    stated.timeline(graph)
    pipeloom.check(graph, stated.schedule)


def _setup(path: Path) -> None:
    _ = read_problem(path).pipeline


def _setups() -> list[bytes]:
    return [msgspec.json.encode(ProblemFile.of(random_problem(seed))) for seed in range(4)]


def _setup_message(path: Path) -> None:
    decode_problem(path.read_bytes())


@cache
def _answered() -> tuple[PlanningProblem, Request, Answer]:
    problem, request = random_problem(3), Request(random_batch(3))
    planned = plan_batch(problem.with_search(method="portfolio"), request.batch, budget=Budget(evaluations=1))
    return problem, request, answer_of(planned, search_s=0.1, ready_ns=5)


def _answer(path: Path) -> None:
    """As whoever asked for a plan takes it."""
    problem, request, _ = _answered()
    answer = decode(Answer, path.read_bytes())
    counts = answer.packing
    packing = packing_from_counts(request.batch, problem.model, problem.layout, counts.samples, counts.counts)
    assert sorted(i for one in packing.microbatches for i in one.samples) == [*range(len(request.batch.samples))]
    verify(answer.plan, problem.layout, packing)
    check_shapes(answer.plan, problem.model, problem.layout, packing)


class _Values:
    """A store that gives any key the content of a file."""

    def __init__(self, value: bytes) -> None:
        self.get, self.check, self.set = lambda _: value, lambda _: True, self._set

    def _set(self, _: str, value: bytes) -> None:
        self.value = value


def _stored_value(path: Path) -> None:
    value = path.read_bytes()
    if value != _marked()[0]:
        assert TcpPlanStore(_Values(value), "nowhere:0", "secret").peek("answer/3") is None


def _marked() -> list[bytes]:
    values = _Values(b"")
    TcpPlanStore(values, "nowhere:0", "secret").put("answer/3", b"a plan")
    return [values.value]


def _architecture(path: Path) -> None:
    assert count_parameters(load_architecture(str(path))) >= 0


def _huggingface(path: Path) -> None:
    config = read_model_config(path)
    check_config(config)
    assert zoo_model(config) in (None, *names("models"))


def _metadata(path: Path) -> None:
    assert path.name == ".metadata"
    PlainReader(str(path.parent)).read_metadata()


_WHOLE = {"trainer.json": b"{}", ".metadata": b"made up", "__0_0.distcp": bytes(64)}


def _digests(path: Path) -> None:
    """A checkpoint counts as whole under its own digests alone."""
    for name, content in _WHOLE.items():
        (path.parent / name).write_bytes(content)
    try:
        damage = find_damage(path.parent, _WHOLE, lambda names: names)
        reported = json.loads(path.read_bytes()) if not damage else None
        assert damage or all(reported.get(name) == digest for name, digest in json.loads(_digested()[0]).items())
    finally:
        for name in _WHOLE:
            (path.parent / name).unlink()


def _tensors(path: Path) -> None:
    (path.parent / "b.safetensors").write_bytes(_safetensors()[0])
    files = TensorFiles(path.parent)
    for key in files.tensors:
        files.read(key)


# ------------------------------------------------------------------ valid inputs


def _format(name: str) -> Callable[[], list[bytes]]:
    return lambda: [FORMATS[f"pipeloom.{name}/1"].encode()]


def _block(language: str, begin: str) -> list[bytes]:
    return [text.encode() for kind, text in BLOCKS if kind == language and text.startswith(begin)]


def _files(*patterns: str) -> Callable[[], list[bytes]]:
    return lambda: [path.read_bytes() for pattern in patterns for path in sorted(ROOT.glob(pattern))]


_ROWS = [
    {"id": "a", "text_tokens": 5, "image_tokens": [4, 9], "image_patches": [16, 36], "video_seconds": [1.5]},
    {"id": "b", "text_tokens": 7, "lengths": {"lm": [12]}},
]


def _lines() -> list[bytes]:
    return ["\n".join(map(json.dumps, _ROWS)).encode()]


def _parquet() -> list[bytes]:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**row, "lengths": None} for row in _ROWS]), out)
    return [out.getvalue()]


_COLUMNS: list[Callable[[Random], pyarrow.Array]] = [
    lambda random: pyarrow.array([random.randbytes(4)]),
    lambda random: pyarrow.array([random.randrange(2**64)], pyarrow.uint64()),
    lambda random: pyarrow.array([random.uniform(-1e300, 1e300)]),
    lambda random: pyarrow.array([float("nan")]),
    lambda random: pyarrow.array([random.randrange(10**9)], pyarrow.timestamp("ns")),
    lambda random: pyarrow.array([random.randrange(10**5)], pyarrow.date32()),
    lambda random: pyarrow.array([random.randrange(10**5)], pyarrow.time64("ns")),
    lambda random: pyarrow.array([random.randrange(10**9)], pyarrow.duration("us")),
    lambda random: pyarrow.array([str(random.randrange(10**9))]).cast(pyarrow.decimal128(30, 4)),
    lambda random: pyarrow.array([{"a": [1, None]}]),
    lambda random: pyarrow.array([[1, None, 3]]),
    lambda random: pyarrow.array([[[1], []]]),
    lambda random: pyarrow.array([None]),
    lambda random: pyarrow.array([random.choice(["", "x" * 5000, "\n", "[/x]"])]),
    lambda random: pyarrow.array(["a"]).dictionary_encode(),
    lambda random: pyarrow.array([[("k", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
]


def _change_columns(random: Random, _: bytes) -> bytes:
    """A column of another type."""
    columns = {"id": pyarrow.array(["a"]), "text_tokens": pyarrow.array([5])}
    columns[random.choice([*_ROWS[0], "lengths", "other", "a.b"])] = random.choice(_COLUMNS)(random)
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), out)
    return out.getvalue()


def _tar(contents: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as shard:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            shard.addfile(member, io.BytesIO(content))
    return out.getvalue()


def _shard() -> list[bytes]:
    return [_tar({"000.json": json.dumps(_ROWS[0]).encode(), "000.jpg": b"pixels", "001.json": b"{}"})]


def _change_members(random: Random, _: bytes) -> bytes:
    """A shard whose members are changed, under any names."""
    names = ["000.json", "000.jpg", "/etc/x.json", "../a.json", "a/b.c.json", ".json", "x" * 90 + ".json"]
    row = change_json(random, json.dumps(random.choice(_ROWS)).encode())
    return _tar({name: random.choice([row, b"", b"\xff", b"[]"]) for name in random.sample(names, 3)})


def _change_headers(random: Random, data: bytes) -> bytes:
    """Other numbers in a header of a tar file, whose sum is right."""
    found = bytearray(data)
    at = 124 if random.random() < 0.7 else random.randrange(500)
    field = random.choice(
        [b"77777777777\0", b"00000000000\0", b"\x80" + bytes(10) + b"\x7f", b"\xff" * 12, b"-1         \0"]
    )
    found[at : at + len(field)] = field
    found[148:156] = b" " * 8
    found[148:156] = b"%06o\0 " % sum(found[:512])
    return bytes(found)


def _wave() -> list[bytes]:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((2, 2, 16000, 0, "NONE", ""))
        file.writeframes(bytes(range(64)))
    return [out.getvalue()]


@cache
def _checkpoint() -> dict[str, bytes]:
    import tempfile
    import warnings

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model.a": torch.zeros(2, 3), "iteration": torch.tensor(3)}, checkpoint_id=folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@cache
def _digested() -> list[bytes]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for name, content in _WHOLE.items():
            (Path(folder) / name).write_bytes(content)
        write_digests(Path(folder), "x", _WHOLE)
        return [(Path(folder) / "digests-x.json").read_bytes()]


def _safetensors() -> list[bytes]:
    head = {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}, "__metadata__": {"format": "pt"}}
    text = json.dumps(head).encode()
    return [len(text).to_bytes(8, "little") + text + bytes(16)]


def _change_head(random: Random, data: bytes) -> bytes:
    """Other values in the head, whose length is right."""
    size = int.from_bytes(data[:8], "little")
    text = change_json(random, data[8 : 8 + size])
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def _traces() -> list[bytes]:
    traced = [documents(random_pipeline(seed), iterations=2) for seed in range(40)]
    return [json.dumps(one[0]).encode() for one in traced if len(one) == 1][:3]


def _history() -> list[bytes]:
    from pipeloom.training.record import Row

    blank: dict[type, Any] = {int: 1, float: 0.5, str: "a", bool: True}
    row = {f.name: blank.get(f.type, 1) for f in msgspec.structs.fields(Row) if f.required}
    return [(json.dumps(row) + "\n").encode() * 2]


def _script() -> bytes:
    return f'#!/bin/bash\nGPUS=8\nARGS="{" ".join(listed())}"\ntorchrun pretrain_gpt.py $ARGS\n'.encode()


def _recipe() -> list[bytes]:
    from tests.integrations.megatron.test_reading import BRIDGE

    return [re.sub("^    ", "", BRIDGE, flags=re.MULTILINE).replace("LAYOUT", "null").encode()]


_JSON: tuple[Mutator, ...] = (change_bytes, change_words, change_json, change_json)
_TEXT: tuple[Mutator, ...] = (change_bytes, change_words, change_words)
_PACKED: tuple[Mutator, ...] = (change_bytes, change_msgpack, change_msgpack)

READERS: dict[str, Reader] = {
    **{
        name: Reader(_load, "a.json", _format(name), _JSON)
        for name in ("instance", "layout", "layers", "batches", "rule")
    },
    "schedule": Reader(_schedule, "a.json", _format("schedule"), _JSON),
    "profile": Reader(lambda path: read_spec(path, Profile), "a.json", _format("profile"), _JSON),
    "samples": Reader(_load, "a.jsonl", _lines, (change_bytes, change_words, change_lines, change_lines)),
    "samples in parquet": Reader(_load, "a.parquet", _parquet, (change_bytes, change_bytes, _change_columns)),
    "samples in a shard": Reader(_load, "a.tar", _shard, (change_bytes, _change_members, _change_headers)),
    "shard with contents": Reader(lambda p: [Shards(p)[0]], "a.tar", _shard, (change_bytes, _change_headers)),
    "sound": Reader(lambda p: decode_wave(Blob("a", p, 0, p.stat().st_size)), "a.wav", _wave, (change_bytes,)),
    "setup": Reader(_setup, "setup.json", _setups, _JSON),
    "setup message": Reader(_setup_message, "a", lambda: [encode_problem(random_problem(3))], _PACKED),
    "request": Reader(lambda p: decode(Request, p.read_bytes()), "a", lambda: [encode(_answered()[1])], _PACKED),
    "answer": Reader(_answer, "a", lambda: [encode(_answered()[2])], _PACKED),
    "value of the plan store": Reader(_stored_value, "a", _marked, (change_bytes,)),
    "plan": Reader(_plan_text, "a.plan", lambda: _block("", "pipeloom.plan/2"), _TEXT),
    "training": Reader(read_config, "train.toml", _files("examples/*/train.toml"), _TEXT),
    "parameters": Reader(
        lambda p: read_spec(p, SearchParams),
        "a.toml",
        lambda: [tomli_w.dumps(_without_none(msgspec.to_builtins(SearchParams()))).encode()],
        _TEXT,
    ),
    "model": Reader(lambda p: read_spec(p, ModelSpec), "a.toml", lambda: _block("toml", "name")[:1], _TEXT),
    "ranks": Reader(lambda p: read_spec(p, RankSpec), "a.toml", lambda: _block("toml", "name")[1:], _TEXT),
    "architecture": Reader(_architecture, "a.toml", _files("src/pipeloom/spec/zoo/models/*.toml"), _TEXT),
    "cluster": Reader(lambda p: load_cluster(str(p)), "a.toml", _files("src/pipeloom/spec/zoo/clusters/*.toml"), _TEXT),
    "device": Reader(lambda p: load_device(str(p)), "a.toml", _files("src/pipeloom/spec/zoo/devices/*.toml"), _TEXT),
    "hugging face": Reader(
        _huggingface, "config.json", _files("tests/integrations/hand_counted/published/*.json"), _JSON
    ),
    "run": Reader(lambda p: load_run(str(p)), "now.toml", _files("examples/compare/*.toml"), _TEXT),
    "megatron's arguments": Reader(
        read_megatron, "a.sh", lambda: [_script(), *_files("examples/megatron/*.sh")()], _TEXT
    ),
    "megatron's recipe": Reader(read_megatron, "a.yaml", _recipe, _TEXT),
    "megatron's layout": Reader(
        lambda p: megatron_stages(p.read_text(errors="replace")), "a", lambda: [b"E|(tt|)*6L", b"Et|t*3|t|tmL"], _TEXT
    ),
    "timers": Reader(read_megatron_log, "a.log", lambda: [log().encode()], _TEXT),
    "trace": Reader(lambda p: read_run([p]), "rank0.json", _traces, _JSON),
    "history": Reader(read_history, "history.jsonl", _history, (change_bytes, change_words, change_lines)),
    "metadata of a checkpoint": Reader(_metadata, ".metadata", lambda: [_checkpoint()[".metadata"]], (change_bytes,)),
    "digests of a checkpoint": Reader(_digests, "digests-x.json", _digested, _JSON),
    "weights": Reader(_tensors, "model.safetensors", _safetensors, (change_bytes, _change_head)),
    "index of weights": Reader(
        _tensors, "model.safetensors.index.json", lambda: [b'{"weight_map": {"a": "b.safetensors"}}'], _JSON
    ),
}


def _without_none(node: Any) -> Any:
    if isinstance(node, dict):
        return {name: _without_none(value) for name, value in node.items() if value is not None}
    return node
