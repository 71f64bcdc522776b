"""Tasks, Pairs and Edges: the validated columns of a `TaskGraph`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.errors import InputError
from pipeloom.limits import MAX_S, MAX_TOTAL
from pipeloom.taskgraph.candidates import Candidate
from pipeloom.totals import NS_PER_S, SMALLER_SIZES, SMALLER_TIMES, summable

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
KIND_NAMES = ("F", "B", "I", "W")


class PairLabel(NamedTuple):
    """Chunk number, microbatch and sub-microbatch of a pair in a layout.

    ``strategy`` is the memory strategy of its durations and bytes, as plans write it (`spec.strategy_word`).
    """

    chunk: int
    microbatch: int
    sub_microbatch: int
    strategy: str = "keep"


_FILE_NAMES = {"duration_ns": "duration_s", "pass_id": "segment"}
"""Columns that instance files name otherwise."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Tasks:
    """Columns of tasks, converted to arrays of integers.

    Attributes
    ----------
    kind : array, shape (num_tasks,)
        `FORWARD`, `BACKWARD`, `INPUT_GRADIENT` or `WEIGHT_GRADIENT`.
    rank, duration_ns, pair, microbatch : array, shape (num_tasks,)
    pass_id : array, shape (num_tasks,)
        Number of the pass of one sub-microbatch through one segment of chunks, forward or backward.
    module : array, shape (num_tasks,)
        Index into ``module_names``.

    Raises
    ------
    InputError
        There is no task, columns differ in length, numbers are out of range, or durations sum to 2**62 ns or more.
    """

    kind: npt.ArrayLike
    rank: npt.ArrayLike
    duration_ns: npt.ArrayLike
    pair: npt.ArrayLike
    pass_id: npt.ArrayLike
    microbatch: npt.ArrayLike
    module: npt.ArrayLike
    module_names: tuple[str, ...]

    def __post_init__(self) -> None:
        """Convert the columns to arrays and check each of them."""
        kind = np.ascontiguousarray(self.kind, dtype=np.int8)
        if len(kind) == 0:
            raise InputError("tasks.kind", "is empty", "give at least one task")
        object.__setattr__(self, "kind", kind)
        # Kernels hold one slot per pass, so pass numbers are below the number of tasks.
        bounds = {"module": len(self.module_names), "pass_id": len(kind)}
        for field in fields(self):
            if field.name in ("kind", "module_names"):
                continue
            name = f"tasks.{_FILE_NAMES.get(field.name, field.name)}"
            value = getattr(self, field.name)
            column = summable(name, value) if field.name == "duration_ns" else np.asarray(value, dtype=np.int64)
            # Kernels are compiled for arrays without strides.
            column = np.ascontiguousarray(column)
            if column.shape != kind.shape:
                raise InputError(name, f"has {column.size} entries, tasks.kind has {len(kind)}")
            check_range(name, column, bounds.get(field.name))
            object.__setattr__(self, field.name, column)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pairs:
    """Columns of pairs: forwards with their backwards.

    Attributes
    ----------
    activation_bytes : array, shape (num_pairs,)
    weight_gradient_bytes : array, shape (num_pairs,), or None
        None: the same as ``activation_bytes``.
    candidates : per pair a tuple of `Candidate`, or None
    labels : per pair a `PairLabel`, or None for graphs that do not come from a layout

    Raises
    ------
    InputError
        Columns differ in length, or sizes are negative or sum to 2**62 bytes or more.
    """

    activation_bytes: npt.ArrayLike
    weight_gradient_bytes: npt.ArrayLike | None = None
    candidates: tuple[tuple[Candidate, ...], ...] | None = None
    labels: Sequence[PairLabel] | None = None

    def __post_init__(self) -> None:
        """Make arrays of the columns and check them."""
        num_pairs = len(np.asarray(self.activation_bytes))
        activation = sizes("pairs.activation_bytes", self.activation_bytes, num_pairs)
        held = self.weight_gradient_bytes
        weight_gradient = activation if held is None else sizes("pairs.weight_gradient_bytes", held, num_pairs)
        object.__setattr__(self, "activation_bytes", activation)
        object.__setattr__(self, "weight_gradient_bytes", weight_gradient)
        if self.candidates is not None:
            check_candidates(self.candidates)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Edges:
    """Columns of edges: dependencies between tasks. The order inside a pair (F, I or B, W) may be left out.

    Attributes
    ----------
    source, target : array, shape (num_edges,)
        Task numbers.
    delay_ns : array, shape (num_edges,)
    bytes : array, shape (num_edges,), or None
        Memory held on the rank of both ends, from the end of the source to the end of the target; None: nothing.

    Raises
    ------
    InputError
        Columns differ in length, numbers are negative, or delays or sizes sum to 2**62 or more.
    """

    source: npt.ArrayLike
    target: npt.ArrayLike
    delay_ns: npt.ArrayLike
    bytes: npt.ArrayLike | None = None

    def __post_init__(self) -> None:
        """Make arrays of the columns and check them."""
        source = np.ascontiguousarray(self.source, dtype=np.int64).reshape(-1)
        target = np.ascontiguousarray(self.target, dtype=np.int64).reshape(-1)
        if len(target) != len(source):
            raise InputError("edges.target", f"has {len(target)} entries, edges.source has {len(source)}")
        delay = sizes("edges.delay_s", self.delay_ns, len(source))
        held = np.zeros(len(source), np.int64) if self.bytes is None else sizes("edges.bytes", self.bytes, len(source))
        check_range("edges.source", source, None)
        check_range("edges.target", target, None)
        for name, column in (("source", source), ("target", target), ("delay_ns", delay), ("bytes", held)):
            object.__setattr__(self, name, column)


def check_range(name: str, values: IntArray, bound: int | None) -> None:
    """Raise if an entry is negative or not below ``bound``."""
    bad = np.flatnonzero(values < 0)
    if bad.size:
        raise InputError(f"{name}[{bad[0]}]", f"{values[bad[0]]} is negative")
    if bound is not None:
        bad = np.flatnonzero(values >= bound)
        if bad.size:
            raise InputError(f"{name}[{bad[0]}]", f"{values[bad[0]]} is not below {bound}")


def sizes(name: str, values: npt.ArrayLike, length: int) -> IntArray:
    """Return times or sizes as an array; raise if it has another length, negative entries or too large a sum."""
    array = np.ascontiguousarray(summable(name, values).reshape(-1))
    check_length(name, array, length)
    check_range(name, array, None)
    return array


def check_length(name: str, array: IntArray, length: int) -> None:
    """Raise if a column has another length."""
    if len(array) != length:
        raise InputError(name, f"has {len(array)} entries, expected {length}")


def check_candidates(candidates: Sequence[tuple[Candidate, ...]]) -> None:
    """Raise `InputError` if some choice of candidates sums to `MAX_TOTAL` nanoseconds or bytes, or more."""
    # Pairs of equal chunks share one tuple, which is read once.
    known: dict[int, tuple[int, int]] = {}
    time = size = 0
    for row in candidates:
        if id(row) not in known:
            most_ns = max(c.forward_ns + c.backward_ns + c.weight_ns for c in row)
            known[id(row)] = most_ns, max(max(c.activation_bytes, c.weight_gradient_bytes) for c in row)
        time, size = time + known[id(row)][0], size + known[id(row)][1]
    if time >= MAX_TOTAL:
        problem = f"the longest of all pairs sum to {time / NS_PER_S:g} s, which is not below {MAX_S:g} s"
        raise InputError("pairs.candidates", problem, SMALLER_TIMES)
    if size >= MAX_TOTAL:
        problem = f"the largest of all pairs sum to {size} bytes, which is not below 2**62"
        raise InputError("pairs.candidates", problem, SMALLER_SIZES)
