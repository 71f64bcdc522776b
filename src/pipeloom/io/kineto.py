"""Read traces of torch.profiler (Kineto's Chrome trace JSON), one file per rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipeloom.bounds import Microseconds, Nanoseconds, Number, WideNumber
from pipeloom.errors import InputError
from pipeloom.io.files import PathLike, binary_kind, printable, read_bytes

SUFFIXES = (".json", ".json.gz")
_CPU = frozenset({"cpu_op", "user_annotation", "python_function"})
_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCH = frozenset({"cuda_runtime", "cuda_driver"})
_HOST = 0
"""The CPU's number among the profiler's device types."""
_MODULE = "nn.Module: "
_MESSAGES = ("c10d::send", "c10d::recv_", "gloo:")
_OURS = ("F,", "B,", "I,", "W,")
"""Prefixes of the categories in Pipeloom's own traces."""
_LOOKED_AT = 1000
_AGAIN = "record it again, and let the profiler end before the job does"


class TraceEvent(NamedTuple):
    """A slice of a trace."""

    start_ns: int
    end_ns: int
    name: str
    is_range: bool
    """Whether it is an annotation (`torch.profiler.record_function`) rather than an operator."""
    shape: tuple[int, ...] = ()
    """Shape of the tensor that a c10d operator sends or receives. Empty for other operators, or if not recorded."""
    dtype: str = ""
    """Dtype of the same tensor, in the notation of the trace."""


class Kernel(NamedTuple):
    """A kernel on a device, and the time at which the host launched it."""

    start_ns: int
    end_ns: int
    name: str
    launched_ns: int


class Link(NamedTuple):
    """Times of a forward operator and of its backward node."""

    forward_ns: int
    backward_ns: int


class Allocation(NamedTuple):
    """Bytes allocated, or freed if negative, at a time of the host's clock."""

    at_ns: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RankTrace:
    """Trace of one rank."""

    source: str
    """Name of the file."""
    rank: int | None
    world_size: int | None
    """None if the profiler did not record them, because `torch.distributed` was not initialized."""
    host: str
    """Host name; empty if unknown."""
    events: tuple[TraceEvent, ...]
    """Operators and annotations, sorted by start. At equal starts the longer comes first, so that enclosing events come
    before enclosed ones."""
    modules: tuple[TraceEvent, ...] = ()
    """Calls of ``nn.Module``, if stacks were recorded (``with_stack=True``)."""
    kernels: tuple[Kernel, ...] = ()
    """Sorted by start."""
    links: tuple[Link, ...] = ()
    """Sorted by the forward's time."""
    allocations: tuple[Allocation, ...] = ()
    """Sorted by time, if memory was recorded (``profile_memory=True``). Device memory if there are kernels, else host
    memory."""


class TraceArguments(msgspec.Struct):
    """Arguments of an event, as far as any reader needs them."""

    correlation: WideNumber | None = None
    external: Any = msgspec.field(name="External id", default=None)
    num_bytes: Any = msgspec.field(name="Bytes", default=None)
    device: Any = msgspec.field(name="Device Type", default=None)
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default_factory=msgspec.Raw)
    types: msgspec.Raw = msgspec.field(name="Input type", default_factory=msgspec.Raw)
    values: msgspec.Raw = msgspec.field(name="Concrete Inputs", default_factory=msgspec.Raw)
    collective: Any = msgspec.field(name="Collective name", default=None)
    input_elements: Any = msgspec.field(name="In msg nelems", default=None)
    output_elements: Any = msgspec.field(name="Out msg nelems", default=None)
    group_size: Any = msgspec.field(name="Group size", default=None)
    group_ranks: Any = msgspec.field(name="Process Group Ranks", default=None)
    dtype: Any = None


class RawEvent(msgspec.Struct):
    """An event as the file has it. ``ts`` is in microseconds since the trace's base."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: Microseconds = 0.0
    dur: Microseconds = 0.0
    tid: Any = None
    id: WideNumber | str | None = None
    args: TraceArguments | None = None


class _Distributed(msgspec.Struct):
    rank: Number | None = None
    world_size: Number | None = None


class TraceFile(msgspec.Struct):
    """A trace as the file has it."""

    events: list[RawEvent] = msgspec.field(name="traceEvents")
    info: _Distributed | None = msgspec.field(name="distributedInfo", default=None)
    host: str = msgspec.field(name="host_name", default="")
    base_ns: Nanoseconds = msgspec.field(name="baseTimeNanoseconds", default=0)
    devices: Any = msgspec.field(name="deviceProperties", default=None)


def trace_files(paths: Sequence[PathLike]) -> tuple[Path, ...]:
    """Return trace files: the given files, and all files of a given folder that end in ``.json`` or ``.json.gz``.

    Raise `InputError` if a folder has no such file, or a file is repeated.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        found = sorted(one for one in path.iterdir() if one.name.endswith(SUFFIXES)) if path.is_dir() else [path]
        if not found:
            raise InputError(printable(str(path)), "is a folder without .json or .json.gz", "give traces, one a rank")
        files += found
    for one in files:
        if files.count(one) > 1:
            raise InputError(printable(str(one)), "is given twice", "give every rank's trace once")
    return tuple(files)


def read_kineto(path: PathLike) -> RankTrace:
    """Read one rank's trace.

    Parameters
    ----------
    path : path
        A file of ``prof.export_chrome_trace`` or ``torch.profiler.tensorboard_trace_handler``, or an array of its
        events. ``.gz`` is decompressed.

    Raises
    ------
    InputError
        If the file cannot be read, is truncated, or is other JSON. The error names the file.
    """
    where, file = printable(str(path)), read_trace_file(path)
    info = file.info or _Distributed()
    rank = info.rank if info.rank is not None else _rank_in_name(Path(path).name)
    launches = {e.args.correlation: _ns(e.ts, file) for e in file.events if e.cat in _LAUNCH and e.args is not None}
    boxes = sorted(_boxes(file, _CPU), key=lambda box: (box.start_ns, -box.end_ns))
    kernels = tuple(sorted(_kernels(file, launches)))
    return RankTrace(
        source=where,
        rank=rank,
        world_size=info.world_size,
        host=file.host,
        events=tuple(box for box in boxes if not box.name.startswith(_MODULE)),
        modules=tuple(box._replace(name=box.name[len(_MODULE) :]) for box in boxes if box.name.startswith(_MODULE)),
        kernels=kernels,
        links=_links(file),
        allocations=tuple(sorted(_allocations(file, on_host=not kernels))),
    )


def read_trace_file(path: PathLike) -> TraceFile:
    """Read the events of a trace.

    Raise `InputError` with the file's name if it cannot be read, is truncated, or is other JSON.
    """
    where = printable(str(path))
    data = read_bytes(path)
    if data[:2] == b"\x1f\x8b":
        raise InputError(where, "is gzip data", "give it a name that ends in .gz")
    kind = binary_kind(data)
    if kind:
        raise InputError(where, f"is {kind}", "unpack it, and give the traces in it (.json, .json.gz)")
    try:
        found = msgspec.json.decode(_closed(data), type=TraceFile | list[RawEvent])
    except msgspec.ValidationError as error:
        raise InputError(
            where, f"is not a trace of torch.profiler: {_lower(str(error))}", "give a trace a rank"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problem = "is empty" if not data.strip() else f"is not complete JSON: {_lower(str(error))}"
        raise InputError(where, problem, _AGAIN) from error
    file = found if isinstance(found, TraceFile) else TraceFile(found)
    if any(event.ph == "X" and event.cat[:2] in _OURS for event in file.events[:_LOOKED_AT]):
        raise InputError(where, "is a trace that Pipeloom wrote", "see difference.html beside it, or pipeloom report")
    return file


def _closed(data: bytes) -> bytes:
    """Close an array of events. The format allows the writer to omit the closing bracket."""
    text = data.strip()
    if not text.startswith(b"[") or text.endswith(b"]"):
        return data
    return text.removesuffix(b",") + b"]"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _ns(ts: float, file: TraceFile) -> int:
    """Convert microseconds since the trace's base to nanoseconds of the host's clock."""
    return file.base_ns + round(ts * 1000)


def _rank_in_name(name: str) -> int | None:
    found = re.search(r"rank[-_.]?(\d+)", name)
    return int(found[1]) if found else None


def _boxes(file: TraceFile, categories: frozenset[str]) -> Iterator[TraceEvent]:
    for event in file.events:
        if event.ph == "X" and event.cat in categories:
            if event.cat == "python_function" and not event.name.startswith(_MODULE):
                continue
            start = _ns(event.ts, file)
            shape, dtype = _message(event) if event.name.startswith(_MESSAGES) else ((), "")
            end = start + round(event.dur * 1000)
            yield TraceEvent(start, end, event.name, event.cat == "user_annotation", shape, dtype)


def _message(event: RawEvent) -> tuple[tuple[int, ...], str]:
    """Return shape and dtype of the first tensor of a message, if shapes were recorded."""
    dims, types = (_first(raw) for raw in ((event.args.dims, event.args.types) if event.args else (b"", b"")))
    while isinstance(dims, list) and dims and isinstance(dims[0], list):
        dims = dims[0]
    shape = tuple(dims) if isinstance(dims, list) and all(isinstance(n, int) for n in dims) else ()
    return shape, types if isinstance(types, str) else ""


def _first(raw: bytes | msgspec.Raw) -> Any:
    values = msgspec.json.decode(raw) if len(raw) else None
    return values[0] if isinstance(values, list) and values else None


def _kernels(file: TraceFile, launches: dict[int | None, int]) -> Iterator[Kernel]:
    for event in file.events:
        if event.ph == "X" and event.cat in _DEVICE and event.args is not None:
            launched = launches.get(event.args.correlation)
            if launched is not None:
                start = _ns(event.ts, file)
                yield Kernel(start, start + round(event.dur * 1000), event.name, launched)


def _allocations(file: TraceFile, *, on_host: bool) -> Iterator[Allocation]:
    for event in file.events:
        args = event.args if event.name == "[memory]" else None
        if args is not None and isinstance(args.num_bytes, int) and (args.device == _HOST) == on_host:
            yield Allocation(_ns(event.ts, file), args.num_bytes)


def _links(file: TraceFile) -> tuple[Link, ...]:
    """Connect the ends of every arrow from an operator to its backward node."""
    begins = {e.id: _ns(e.ts, file) for e in file.events if e.ph == "s" and e.cat == "fwdbwd"}
    ends = {e.id: _ns(e.ts, file) for e in file.events if e.ph == "f" and e.cat == "fwdbwd"}
    return tuple(sorted(Link(begin, ends[number]) for number, begin in begins.items() if number in ends))
