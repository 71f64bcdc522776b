"""Recognize files of evidence, and read them."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterable, Sequence, Set
from pathlib import Path

from pipeloom.calibration.evidence import Evidence
from pipeloom.calibration.kernel_rows import Row, json_rows, missing_columns, read_kernel_rows
from pipeloom.calibration.nccl_tests import is_nccl_tests, read_nccl_tests
from pipeloom.calibration.traces import read_trace
from pipeloom.errors import InputError, visible_line
from pipeloom.io.files import binary_kind, printable, read_bytes
from pipeloom.spec.hardware import ClusterSpec, DeviceSpec
from pipeloom.validation.runs import csv_table, run_of

_RUN_TIMES = frozenset(("iteration_s", "tokens_s_gpu"))
"""Columns of measured iterations, of which a table of runs has one."""
_LOOKED = "give a trace of torch.profiler, output of nccl-tests, or a table of kernels or of runs (docs/formats.md)"


def read_evidence(
    paths: Sequence[str | Path], base: DeviceSpec, *, per_node: int = 0, cluster: ClusterSpec | None = None
) -> Evidence:
    """Read files of evidence about a device, whose table is ``base``. The other options are those of `Evidence`.

    A file, or a row of one, that cannot be used is counted by its reason. The evidence may have nothing usable. Raise
    `InputError` if a file cannot be read.
    """
    evidence = Evidence(base, per_node, cluster)
    for path in map(str, paths):
        if path in evidence.kinds:
            raise InputError(printable(path), "is given twice", "give every file once")
        evidence.source = path
        try:
            evidence.kinds[path] = _read(evidence, path)
        except InputError as error:
            if error.entity != printable(path) or not os.path.isfile(path):
                raise
            evidence.kinds[path] = "not read"
            evidence.reject(f"file that {error.problem}")
    evidence.merge_repeats()
    return evidence


def _read(evidence: Evidence, path: str) -> str:
    """Read one file into the evidence, and return what it is."""
    data = read_bytes(path)
    if kind := binary_kind(data):
        raise InputError(printable(path), f"is {kind}", _LOOKED)
    if data[:1] == b"\x80":
        raise InputError(printable(path), "is a pickle, which can run code", "write its times as a table")
    text = data.decode("utf-8", errors="replace")
    if is_nccl_tests(text):
        read_nccl_tests(evidence, text, Path(path).name)
        return "output of nccl-tests"
    if data[:256].lstrip()[:1] in (b"{", b"["):
        rows = json_rows(data) if b'"ph"' not in data[:1_000_000] else None
        if rows and (kind := _read_table(evidence, {name.strip() for row in rows for name in row}, rows)):
            return kind
        read_trace(evidence, path)
        return "trace of torch.profiler"
    try:
        names, cells = csv_table(text)
        if kind := _read_table(evidence, set(names), cells):
            return kind
    except csv.Error as error:
        raise InputError(printable(path), f"is not CSV ({error}); is a quote not closed?") from error
    first = visible_line(re.sub(r"\s+", " ", text[:80]).strip()) or "nothing"
    raise InputError(printable(path), f"is none of the known kinds; it begins with {first!r}", _LOOKED)


def _read_table(evidence: Evidence, names: Set[str], rows: Iterable[Row]) -> str:
    """Read rows into the evidence if all can be parsed, and return what they are; empty: something else.

    Raise `InputError` if the table lacks a column.
    """
    missing, has_run_times = missing_columns(names), not names.isdisjoint(_RUN_TIMES)
    if "id" in names and (missing or has_run_times):
        _read_runs(evidence, list(rows))
        return "table of runs"
    if not missing:
        read_kernel_rows(evidence, list(rows))
        return "table of kernels"
    if has_run_times or len(missing) == 1:
        problem = f"is a table without {'the column id' if has_run_times else missing[0]}"
        raise InputError(printable(evidence.source), problem, "name its columns as in docs/formats.md")
    return ""


def _read_runs(evidence: Evidence, rows: Iterable[Row]) -> None:
    for number, row in enumerate(rows, 1):
        run = run_of(row, f"row {number}")
        if run.measured_s is None:
            evidence.reject("run without its time")
        else:
            evidence.runs.append((evidence.source, run))
