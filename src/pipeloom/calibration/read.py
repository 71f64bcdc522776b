"""Recognize files of evidence, and read them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from pipeloom.calibration.evidence import Evidence, nothing_usable
from pipeloom.calibration.kernel_rows import csv_rows, is_kernel_table, json_rows, read_kernel_rows
from pipeloom.calibration.nccl_tests import is_nccl_tests, read_nccl_tests
from pipeloom.calibration.traces import read_trace
from pipeloom.errors import InputError, visible_line
from pipeloom.io.files import binary_kind, printable, read_bytes
from pipeloom.spec.hardware import ClusterSpec, DeviceSpec
from pipeloom.validation.runs import run_of

_RUNS = frozenset(("id", "gbs", "layers"))
"""Columns by which a table is one of iterations."""
_LOOKED = "give a trace of torch.profiler, output of nccl-tests, or a table of kernels or of runs (docs/formats.md)"


def read_evidence(
    paths: Sequence[str | Path], base: DeviceSpec, *, per_node: int = 0, cluster: ClusterSpec | None = None
) -> Evidence:
    """Read files of evidence about a device.

    A file, or a row of one, that cannot be used is counted by its reason.

    Raises
    ------
    InputError
        If a file cannot be read, or no file has anything usable.
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
    if not evidence.observations and not evidence.runs:
        raise nothing_usable(evidence)
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
        if rows and is_kernel_table(name for row in rows for name in row):
            read_kernel_rows(evidence, rows)
            return "table of kernels"
        read_trace(evidence, path)
        return "trace of torch.profiler"
    header = [name.strip() for name in text.lstrip("\ufeff").partition("\n")[0].split(",")]
    if set(header) >= _RUNS:
        _read_runs(evidence, text)
        return "table of runs"
    if is_kernel_table(header):
        read_kernel_rows(evidence, csv_rows(text.lstrip("\ufeff")))
        return "table of kernels"
    first = visible_line(re.sub(r"\s+", " ", text[:80]).strip()) or "nothing"
    raise InputError(printable(path), f"is none of the known kinds; it begins with {first!r}", _LOOKED)


def _read_runs(evidence: Evidence, text: str) -> None:
    for number, row in enumerate(csv_rows(text.lstrip("\ufeff")), 1):
        run = run_of(row, f"row {number}")
        if run.measured_s is None:
            evidence.reject("run without its time")
        else:
            evidence.runs.append((evidence.source, run))
