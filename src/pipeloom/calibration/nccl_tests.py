"""Output of nccl-tests (``all_reduce_perf`` and the others), as text."""

from __future__ import annotations

import re

from pipeloom.calibration.evidence import BUS_FACTORS, Evidence, collective_kind, other_device, shown

_TEST = re.compile(r"(?<![a-z])(all_reduce|all_gather|reduce_scatter|alltoall|sendrecv|broadcast|reduce)_perf")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s+(.*\S)")
_NUMBER = r"([\d.]+|N/A)"
_ROW = re.compile(
    rf"(?:^|[\s>:|])(\d+)\s+(\d+)\s+(\w+)\s+(\w+)\s+(-?\d+)\s+{_NUMBER}\s+{_NUMBER}\s+{_NUMBER}(?=\s|$)(.*)$"
)
"""A row: size, count, type, redop, root, time, algbw, busbw, and the same in place. Launchers put words before it."""


def is_nccl_tests(text: str) -> bool:
    """Return whether a text has the table of nccl-tests."""
    return re.search(r"#\s+size\s+count\s+type", text) is not None


def read_nccl_tests(evidence: Evidence, text: str, file_name: str) -> None:
    """Add the collectives of one output of nccl-tests, or of several, one after the other.

    The number of devices and of nodes are those of the header. Without a header, bus over algorithm bandwidth tells
    the number of devices. Of the times in place and out of place, the shorter counts.
    """
    from_name = _TEST.search(file_name)
    test, ranks, hosts, gpu = from_name[1] if from_name else "", 0, set[str](), ""
    for line in text.splitlines():
        if named := _TEST.search(line):
            test = named[1]
        if line.lstrip().startswith("# nThread") or "# nThread" in line:
            ranks, hosts, gpu = 0, set(), ""
        if rank := _RANK.search(line):
            ranks = max(ranks, int(rank[1]) + 1)
            hosts.add(rank[2])
            gpu = rank[3]
        elif row := _ROW.search(line):
            if other_device(gpu, evidence.base):
                evidence.reject(f"measured on another device ({shown(gpu)})")
            elif not test:
                evidence.reject("row of a test whose name the file does not have; name the file all_reduce_perf.txt")
            else:
                _row(evidence, row, test, ranks, 0 if evidence.joins_hosts else len(hosts))
        elif re.match(r"\s*\d+\s+\d+\s+\w+\s", line):
            evidence.reject("line that is not a row of nccl-tests")


def _row(evidence: Evidence, row: re.Match[str], test: str, ranks: int, nodes: int) -> None:
    size, out_of_place, algorithm, bus = row[1], row[6], row[7], row[8]
    # In place: time, algbw and busbw follow the number of wrong values.
    rest = row[9].split()
    times = [float(text) for text in (out_of_place, rest[1] if len(rest) > 3 else "N/A") if _is_number(text)]
    if not times:
        return evidence.reject("row of nccl-tests without a time")
    if not ranks:
        ranks = _ranks_of(test, algorithm, bus)
    if not ranks:
        return evidence.reject("row of nccl-tests without a header that lists the ranks")
    return evidence.collective(test, float(size), min(times) * 1e-6, ranks, nodes=nodes)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d*)?", text) is not None


def _ranks_of(test: str, algorithm: str, bus: str) -> int:
    """Return the number of devices from bus over algorithm bandwidth, (n - 1) / n or twice it; 0: unknown.

    Bandwidths have two decimals, so small ones do not tell.
    """
    factor = BUS_FACTORS.get(collective_kind(test) or "")
    if factor is None or not (_is_number(algorithm) and _is_number(bus)) or float(algorithm) < 1:
        return 0
    share = float(bus) / float(algorithm) / factor
    ranks = round(1 / (1 - share)) if 0.4 < share < 0.995 else 0
    return ranks if ranks > 1 and abs((ranks - 1) / ranks - share) < 0.004 else 0
