"""Read published training runs from a table."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Literal

from pipeloom.errors import InputError, visible_line
from pipeloom.limits import MAX_COUNT

DATA = files("pipeloom.validation") / "data"
"""Tables that come with Pipeloom."""
ModelKind = Literal["dense", "experts", "other"]
FLAGS = {**dict.fromkeys(("1", "1.0", "true", "yes"), True), **dict.fromkeys(("0", "0.0", "false", "no"), False)}
"""Values of a cell that is 0 or 1, also as pandas writes a column with empty cells."""
EXTRA_CELLS = " extra cells"
"""Key of the cells of a row that have no column. Names of columns do not begin with a space."""
_KINDS: dict[str, ModelKind] = {"dense": "dense", "moe": "experts", "mla-moe": "experts"}


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One published training run. Fields are the columns of the table; None or an empty text: not stated.

    ``faults`` are cells that could not be read. A run with faults cannot be predicted.
    """

    id: str
    source: str = ""
    ref: str = ""
    device: str = ""
    gpus: int | None = None
    per_node: int | None = None
    model: str = ""
    arch: str = ""
    layers: int | None = None
    hidden: int | None = None
    ffn: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    vocab: int | None = None
    seq_len: int | None = None
    gated: bool | None = None
    norm: str = ""
    pos: str = ""
    tied: bool | None = None
    bias: bool | None = None
    qk_norm: bool | None = None
    experts: int | None = None
    topk: int | None = None
    moe_ffn: int | None = None
    shared_ffn: int | None = None
    dense_layers: int | None = None
    window: str = ""
    mla: str = ""
    mtp: int | None = None
    images: int | None = None
    patches: int | None = None
    frozen: str = ""
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    cp: int | None = None
    ep: int | None = None
    etp: int | None = None
    dp: int | None = None
    layout: str = ""
    sp: bool | None = None
    zero: int | None = None
    mbs: int | None = None
    gbs: int | None = None
    schedule: str = ""
    recompute: str = ""
    precision: str = ""
    attention: str = ""
    task: str = ""
    overlap: str = ""
    iteration_s: float | None = None
    tokens_s_gpu: float | None = None
    tflops_gpu: float | None = None
    mfu: float | None = None
    mem_bytes: float | None = None
    mem_kind: str = ""
    how: str = ""
    reason: str = ""
    assumed: str = ""
    flag: str = ""
    split: str = ""
    faults: tuple[str, ...] = field(default=())

    @property
    def measured_s(self) -> float | None:
        """Published seconds of an iteration, from the tokens per second where the source gives these; None: unknown."""
        if self.iteration_s:
            return self.iteration_s
        if self.tokens_s_gpu and self.gbs and self.seq_len and self.gpus:
            return self.gbs * self.seq_len / (self.tokens_s_gpu * self.gpus)
        return None

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts. Latent attention alone does not mean that."""
        latent = self.arch == "mla-moe" and any((self.experts, self.topk, self.moe_ffn))
        return self.arch == "moe" or latent or (not self.arch and bool(self.experts))

    def per_token(self, seconds: float) -> float:
        """Return the seconds of a device for each token, if an iteration takes ``seconds``."""
        return seconds * (self.gpus or 1) / ((self.gbs or 1) * (self.seq_len or 1))

    @property
    def kind(self) -> ModelKind:
        """Kind of the model: dense, experts, or other (hybrid, multimodal or not stated)."""
        return _KINDS.get(self.arch, "other")


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """Return the published runs that come with Pipeloom."""
    with as_file(DATA / "runs.csv") as path:
        return tuple(read_runs(path))


@cache
def published_sources() -> frozenset[str]:
    """Return the sources of the published runs that come with Pipeloom."""
    return frozenset(run.source for run in published_runs())


def read_runs(path: Path) -> list[PublishedRun]:
    """Read a table of runs, CSV with a header. Unknown columns are ignored.

    A cell that cannot be read becomes a fault of its run; the others are read all the same. Raise `InputError` if the
    file cannot be read, has no column ``id``, or no rows.
    """
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            names, rows = csv_table(file.read())
        if "id" not in names:
            raise InputError(str(path), "has no column 'id'", "the first line names the columns; see docs/formats.md")
        runs = [run_of(row, f"row {number}") for number, row in enumerate(rows, 1)]
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error.strerror or error})") from error
    except csv.Error as error:
        raise InputError(str(path), f"is not CSV ({error})") from error
    if not runs:
        raise InputError(str(path), "has no rows", "give one run a row")
    return runs


def csv_table(text: str) -> tuple[list[str], Iterator[dict[str, str]]]:
    """Return the header of a CSV and its rows, which are parsed one at a time.

    Cells that a row lacks are empty. A row with more cells than the header has the key `EXTRA_CELLS`. The text may
    begin with a byte-order mark, and spaces may follow its commas.
    """
    lines = io.StringIO(text.lstrip("\ufeff"), newline="")
    reader = csv.DictReader(lines, restkey=EXTRA_CELLS, skipinitialspace=True)
    reader.fieldnames = names = [name.strip() for name in reader.fieldnames or ()]
    return names, ({name: cell if isinstance(cell, str) else "" for name, cell in row.items()} for row in reader)


def run_of(row: Mapping[str, str], default_id: str) -> PublishedRun:
    """Return the run of one row of a table."""
    values: dict[str, object] = {}
    faults = []
    for name, read in _COLUMNS.items():
        text = row.get(name, "").strip()
        if not text:
            continue
        try:
            values[name] = read(text)
        except ValueError as error:
            faults.append(f"{name}: {visible_line(text)!r} {error}")
    if EXTRA_CELLS in row:
        faults.append("has more cells than the header")
    values.setdefault("id", default_id)
    return PublishedRun(**values, faults=tuple(faults))  # type: ignore[arg-type]


def _flag(text: str) -> bool:
    if text.lower() not in FLAGS:
        raise ValueError("is neither 0 nor 1")
    return FLAGS[text.lower()]


def _number(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError("is not positive and finite")
    return number


def _size(text: str) -> int:
    size = float(text)
    if not 0 <= size <= MAX_COUNT or size != int(size):
        raise ValueError(f"is not a whole number from 0 to {MAX_COUNT}")
    return int(size)


_READ: dict[str, Callable[[str], object]] = {
    "int | None": _size,
    "float | None": _number,
    "bool | None": _flag,
    "str": str,
}
"""How a cell is read, by the type of its field."""
_COLUMNS = {each.name: _READ[str(each.type)] for each in fields(PublishedRun) if each.name != "faults"}
