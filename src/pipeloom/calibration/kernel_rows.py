"""Benchmarks of kernels as rows of a table: CSV with a header, or a JSON list of objects."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from typing import Any

import msgspec

from pipeloom.calibration.evidence import AttentionShape, Direction, Evidence, bus_share, bytes_of, other_device
from pipeloom.errors import visible_line
from pipeloom.validation.runs import FLAGS

Row = Mapping[str, str]
LONGEST_CELL = 60
"""Characters of a cell that a reason shows."""
_SYNONYMS = {
    "kind": ("kind", "op", "operator"),
    "device": ("device", "gpu", "hardware", "accelerator"),
    "dtype": ("dtype", "precision"),
    "direction": ("direction", "pass", "pass_"),
    "m": ("m", "M"),
    "n": ("n", "N"),
    "k": ("k", "K"),
    "batch": ("batch", "b"),
    "groups": ("groups",),
    "seq": ("seq", "seq_len", "q_len", "length"),
    "kv_seq": ("kv_seq", "kv_len"),
    "heads": ("heads",),
    "kv_heads": ("kv_heads",),
    "head_dim": ("head_dim", "qk_dim"),
    "v_dim": ("v_dim",),
    "causal": ("causal", "mask"),
    "window": ("window",),
    "backend": ("backend", "framework", "kernel"),
    "sustained": ("sustained",),
    "rows": ("rows",),
    "width": ("width",),
    "collective": ("collective",),
    "ranks": ("ranks", "gpus", "nranks"),
    "nodes": ("nodes",),
    "algbw": ("algbw", "algbw_GBps"),
    "busbw": ("busbw", "busbw_GBps"),
    "bytes": ("bytes", "message_bytes", "payload_bytes", "size"),
}
"""Names of each column; the first that a row fills counts."""
_SECONDS = {
    **dict.fromkeys(("seconds", "s", "time_s", "latency_s"), 1.0),
    **dict.fromkeys(("ms", "time_ms", "latency_ms"), 1e-3),
    **dict.fromkeys(("us", "time_us", "latency_us"), 1e-6),
    **dict.fromkeys(("ns", "time_ns", "latency_ns"), 1e-9),
}
"""Columns of times, and the seconds of their unit."""
_MASKS = {
    **dict.fromkeys(("causal", "top_left", "bottom_right"), True),
    **dict.fromkeys(("none", "no_mask", "full"), False),
}
_PRODUCTS = frozenset(("gemm", "matmul", "mm", "linear"))
_MEMORY_BOUND = {
    **{
        kind: kind for kind in ("norm", "activation", "add", "multiply", "copy", "softmax", "cast", "rotary", "permute")
    },
    **dict.fromkeys(("layer_norm", "rms_norm", "layernorm", "rmsnorm"), "norm"),
    **dict.fromkeys(("gelu", "silu", "swiglu", "relu"), "activation"),
    **dict.fromkeys(("memory", "elementwise", "triad"), "copy"),
}
"""Kind of operator by its name, of operators that memory limits."""


def json_rows(data: bytes) -> list[dict[str, str]] | None:
    """Return the objects of a JSON list; None if it is other JSON."""
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        return None
    return [{str(name): _text(value) for name, value in row.items()} for row in found]


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def missing_columns(names: Set[str]) -> list[str]:
    """Return what a table of kernels has and these columns do not: times, sizes, or both."""
    sizes = [{"m", "n", "k"}, {"M", "N", "K"}, {"heads"}, {"rows", "width"}, {"collective"}]
    sizes += [{name} for name in _SYNONYMS["bytes"]]
    times = {*_SECONDS, *_SYNONYMS["algbw"], *_SYNONYMS["busbw"]}
    missing = [] if names & times else ["a column of times (seconds, ms, us or ns)"]
    if not any(some <= names for some in sizes):
        missing.append("columns of sizes (m, n and k; heads; rows and width; bytes; or collective)")
    return missing


def read_kernel_rows(evidence: Evidence, rows: Iterable[Row]) -> None:
    """Add the kernels of a table. A row that cannot be used is counted by its reason."""
    for row in rows:
        try:
            _read(evidence, _Cells(row))
        except ValueError as error:
            evidence.reject(str(error))


class _Cells:
    """Cells of a row, by any name of their column."""

    def __init__(self, row: Row) -> None:
        self.row = {name.strip(): cell.strip() for name, cell in row.items()}

    def text(self, name: str) -> str:
        """Return the text of the first filled column; empty if none is."""
        return next((cell for each in _SYNONYMS[name] if (cell := self.row.get(each, ""))), "")

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number, or the default where the cell is empty."""
        text = self.text(name)
        if not text and default is not None:
            return default
        if not text:
            raise ValueError(f"row without {name}")
        return _number(text, name)

    def flag(self, name: str, words: Mapping[str, bool]) -> bool | None:
        """Return a flag: 0, 1 or one of other words; None where the cell is empty."""
        text = self.text(name).lower()
        if text and text not in words:
            raise ValueError(f"{name} {_shown(text)}, which is neither 0 nor 1")
        return words.get(text)

    @property
    def seconds(self) -> float:
        """The measured time."""
        for name, unit in _SECONDS.items():
            if text := self.row.get(name, ""):
                return _number(text, name) * unit
        raise ValueError("row without a time (seconds, ms, us or ns)")

    def seconds_of_message(self, name: str, num_bytes: float, ranks: float) -> float:
        """Return the time of a collective, from its bandwidth (GB/s, as nccl-tests counts) if that alone is stated."""
        if not any(self.row.get(column, "") for column in _SECONDS):
            if algorithm := self.text("algbw"):
                return num_bytes / max(_number(algorithm, "algbw") * 1e9, 1e-300)
            if bus := self.text("busbw"):
                return num_bytes * bus_share(name, ranks) / max(_number(bus, "busbw") * 1e9, 1e-300)
        return self.seconds


def _shown(text: str) -> str:
    return visible_line(text)[:LONGEST_CELL]


def _number(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name} that is not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{name} that is not a number")
    return value


def _read(evidence: Evidence, cells: _Cells) -> None:
    stated = cells.text("device")
    if other_device(stated, evidence.base):
        raise ValueError(f"measured on another device ({_shown(stated)})")
    kind = cells.text("kind").lower()
    direction, dtype, hot = _direction(cells), cells.text("dtype"), bool(cells.flag("sustained", FLAGS))
    if cells.text("collective") or kind == "collective":
        name, ranks = cells.text("collective") or kind, cells.number("ranks")
        seconds = cells.seconds_of_message(name, cells.number("bytes"), ranks)
        return evidence.collective(name, cells.number("bytes"), seconds, ranks, nodes=cells.number("nodes", 0))
    if kind in _PRODUCTS or (not kind and not cells.text("groups") and all(map(cells.text, "mnk"))):
        if direction == "backward" and kind == "linear":
            raise ValueError("backward of a linear layer; give its two products apart")
        sizes = [cells.number(name) for name in ("m", "n", "k")]
        return evidence.product(sizes, cells.seconds, dtype, batch=cells.number("batch", 1), hot=hot)
    if kind in ("grouped_gemm", "grouped_matmul") or (not kind and cells.text("groups")):
        sizes = [cells.number(name) for name in ("m", "n", "k")]
        return evidence.product(sizes, cells.seconds, dtype, batch=cells.number("groups"), grouped=True, hot=hot)
    if "attention" in kind or (not kind and cells.text("heads")):
        return _attention(evidence, cells, direction, hot=hot)
    if kind in _MEMORY_BOUND or (not kind and (cells.text("bytes") or cells.text("width"))):
        name = _MEMORY_BOUND.get(kind, "norm" if cells.text("width") else "copy")
        return evidence.moved(name, _bytes(cells, direction), cells.seconds)
    raise ValueError(f"kind {_shown(kind) or 'of kernel that is not stated'}, which calibrate does not read")


def _direction(cells: _Cells) -> Direction:
    word = cells.text("direction").lower().split(" ")[0]
    if word.startswith(("bwd", "backward")):
        return "backward"
    if word.startswith(("fwd", "forward")) or not word:
        return "forward"
    raise ValueError(f"direction {_shown(word)}, which is neither forward nor backward")


def _attention(evidence: Evidence, cells: _Cells, direction: Direction, *, hot: bool) -> None:
    if cells.number("window", 0) > 0:
        raise ValueError("attention with a window")
    causal = cells.flag("causal", FLAGS | _MASKS)
    if causal is None:
        raise ValueError("attention whose mask is not stated (causal: 0 or 1)")
    length, heads, width = cells.number("seq"), cells.number("heads"), cells.number("head_dim")
    shape = AttentionShape(
        cells.number("batch", 1),
        length,
        cells.number("kv_seq", length),
        heads,
        cells.number("kv_heads", heads) or heads,
        width,
        cells.number("v_dim", width) or width,
        causal,
    )
    flash2 = cells.text("backend").lower() in ("flash2", "fa2", "flash_attention_2", "flash")
    evidence.attention(shape, cells.seconds, cells.text("dtype"), direction=direction, hot=hot, flash2=flash2)


def _bytes(cells: _Cells, direction: Direction) -> float:
    """Return what a memory-bound kernel reads and writes: two tensors forward, three backward, if it is not stated."""
    if cells.text("bytes"):
        return cells.number("bytes")
    width = bytes_of(cells.text("dtype"))
    return cells.number("rows") * cells.number("width") * width * (3 if direction == "backward" else 2)
