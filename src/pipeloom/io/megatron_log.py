"""Read timers from the log of a Megatron-LM run: forward and backward seconds of each rank."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from pipeloom.errors import InputError
from pipeloom.io.files import PathLike, binary_kind, printable, read_bytes, read_text
from pipeloom.limits import MAX_DEVICES, MAX_WAIT_S

FORWARD_BACKWARD = "forward-backward"
_NAMES = ("forward-compute", "backward-compute", FORWARD_BACKWARD)
_ARGUMENT = re.compile(r"\b([a-z][a-z0-9_]*) \.{3,} (\S+)\s*$")
_HEADING = re.compile(r"([a-z][a-z0-9/-]*):\s*$")
_RANK = re.compile(r"\brank\s+(\d+): (\d+(?:\.\d+)?)\s*$")
_EXTREMES = re.compile(r"\(min, max\) time across ranks|\bmax time across ranks")
_ELAPSED = re.compile(r"elapsed time per iteration \(ms\): (\d+(?:\.\d+)?)")
_OTHERS = {
    ".yaml": "a YAML file",
    ".yml": "a YAML file",
    ".toml": "a TOML file",
    ".csv": "a table of comma-separated values",
    ".py": "a Python file",
}
_GIVE = "give traces of torch.profiler (.json, .json.gz; unpacked, if they are in an archive) or a log of Megatron-LM"
_WHY = "run Megatron-LM with --timing-log-level 2 --timing-log-option all"


@dataclass(frozen=True, slots=True)
class MegatronTimers:
    """Timers of one iteration, averaged over the logged iterations."""

    source: str
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    """Seconds of each pipeline rank for all microbatches and all of its chunks, averaged over its replicas and tensor
    ranks."""
    forward_backward_s: float
    """Seconds of the whole pipeline on the slowest rank. 0 if not logged."""
    num_microbatches: int
    chunks_per_rank: int
    """Virtual pipeline stages of each rank."""
    num_logged: int
    """Number of logged iterations. If there are several, the first does not count, because it includes warm-up."""


def read_megatron_log(path: PathLike, *, num_microbatches: int | None = None) -> MegatronTimers:
    """Read the timers of a log.

    Parameters
    ----------
    path : path
        What rank 0 or the last rank printed, with the arguments that Megatron-LM prints at its start.
    num_microbatches : int, optional
        Of an iteration and replica; default: by the printed arguments.

    Raises
    ------
    InputError
        Naming the file and the timer or argument that is missing, and how to get it.
    """
    where = printable(str(path))
    kind = _OTHERS.get(Path(path).suffix) or binary_kind(read_bytes(path))
    if kind:
        raise InputError(where, f"is {kind}", _GIVE)
    lines = read_text(path).splitlines()
    arguments = {found[1]: found[2] for line in lines if (found := _ARGUMENT.search(line))}
    logged = list(_logged(lines, where))
    if not logged:
        if any(_EXTREMES.search(line) for line in lines):
            raise InputError(where, "has only the minimum and maximum over ranks, not each rank's time", _WHY)
        raise InputError(where, "has no timers of Megatron-LM", _WHY)
    for name in _NAMES[:2]:
        if any(name not in one for one in logged):
            raise InputError(where, f"has no timer {name}", _WHY)
    counted = logged[1:] or logged
    world = 1 + max(rank for one in counted for times in one.values() for rank in times)
    pipeline = _number(arguments, "pipeline_model_parallel_size", where)
    # Megatron-LM's order of ranks is tp-cp-ep-dp-pp, or tp-cp-ep-pp-dp with this argument.
    before_replicas = arguments.get("use_tp_pp_dp_mapping") == "True"
    width = _inside(arguments) if before_replicas else world // pipeline
    if world % pipeline or (before_replicas and world % (pipeline * width)):
        raise InputError(
            where,
            f"times {world} ranks, pipeline_model_parallel_size is {pipeline}"
            + (f", and each stage has {width} tensor and context ranks" if before_replicas else ""),
            "give the log of one whole run",
        )
    forward, backward = (_per_rank(counted, name, width, pipeline) for name in _NAMES[:2])
    whole = [max(one[FORWARD_BACKWARD].values()) for one in counted if FORWARD_BACKWARD in one]
    return MegatronTimers(
        source=where,
        forward_s=forward,
        backward_s=backward,
        forward_backward_s=fmean(whole) / 1e3 if whole else 0.0,
        num_microbatches=num_microbatches or _microbatches(arguments, where, world, pipeline),
        chunks_per_rank=_optional(arguments, "virtual_pipeline_model_parallel_size"),
        num_logged=len(logged),
    )


def _logged(lines: list[str], where: str) -> Iterator[dict[str, dict[int, float]]]:
    """Yield each block of timers: milliseconds of each rank by the name of the timer."""
    block: dict[str, dict[int, float]] = {}
    name = ""
    for number, line in enumerate(lines, 1):
        if found := _RANK.search(line):
            if name in _NAMES:
                place, rank, milliseconds = f"{where}: line {number}", int(found[1][:20]), float(found[2])
                if rank >= MAX_DEVICES:
                    raise InputError(f"{place}: rank", f"{rank} is not below {MAX_DEVICES}")
                if milliseconds > 1e3 * MAX_WAIT_S:
                    raise InputError(f"{place}: {name}", f"{milliseconds:g} ms is above {1e3 * MAX_WAIT_S:g} ms")
                block.setdefault(name, {})[rank] = milliseconds
        elif found := _HEADING.search(line):
            name = found[1]
        elif _ELAPSED.search(line):
            if block:
                yield block
            block, name = {}, ""
    if block:
        yield block


def _per_rank(logged: list[dict[str, dict[int, float]]], name: str, width: int, pipeline: int) -> tuple[float, ...]:
    """Return mean seconds of each pipeline rank. ``width`` consecutive ranks have the same pipeline rank."""
    rows: list[list[float]] = [[] for _ in range(pipeline)]
    for one in logged:
        for rank, milliseconds in one[name].items():
            rows[rank // width % pipeline].append(milliseconds / 1e3)
    return tuple(fmean(row) if row else 0.0 for row in rows)


def _microbatches(arguments: dict[str, str], where: str, world: int, pipeline: int) -> int:
    whole, one = (_number(arguments, name, where) for name in ("global_batch_size", "micro_batch_size"))
    replicas = max(1, world // (pipeline * _inside(arguments)))
    if whole % (one * replicas):
        raise InputError(
            where,
            f"global_batch_size {whole} is not a multiple of micro_batch_size {one} times {replicas} replicas",
            "give --microbatches",
        )
    return whole // (one * replicas)


def _inside(arguments: dict[str, str]) -> int:
    """Return the ranks of one pipeline rank of one replica: tensor and context ranks."""
    return _optional(arguments, "tensor_model_parallel_size") * _optional(arguments, "context_parallel_size")


def _number(arguments: dict[str, str], name: str, where: str) -> int:
    value = arguments.get(name, "")
    number = _whole(value)
    if number < 1:
        raise InputError(
            f"{where}: {name}",
            f"{value or 'is missing'}",
            "give the whole log, with the arguments printed at its start",
        )
    return number


def _optional(arguments: dict[str, str], name: str) -> int:
    """Return an argument, or 1 if it is not a number."""
    return _whole(arguments.get(name, "")) or 1


def _whole(value: str) -> int:
    """Return the number in a word; 0 if it is not a number or has too many digits."""
    return int(value) if re.fullmatch("[0-9]{1,12}", value) else 0
