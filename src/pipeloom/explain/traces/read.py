"""Reading and explaining traces and logs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeloom.errors import visible_line
from pipeloom.explain.traces.explained import Explanation, explain_run
from pipeloom.explain.traces.layers import layer_shares
from pipeloom.explain.traces.run import ordered_traces, traced_run
from pipeloom.explain.traces.timers import TimersExplained, explain_timers
from pipeloom.explain.traces.traced import TracedRun
from pipeloom.io.files import PathLike
from pipeloom.io.kineto import SUFFIXES, RankTrace, read_kineto, trace_files
from pipeloom.io.megatron_log import read_megatron_log
from pipeloom.search import Budget


def is_log(paths: Sequence[PathLike]) -> bool:
    """Return whether the paths are one log of Megatron-LM. Traces end in ``.json`` or ``.json.gz``."""
    return len(paths) == 1 and Path(paths[0]).is_file() and not Path(paths[0]).name.endswith(SUFFIXES)


def explain_traces(paths: Sequence[PathLike], *, budget: Budget, seed: int = 0) -> Explanation:
    """Read the traces of a pipeline's ranks and explain them.

    ``paths`` are files of torch.profiler, one per rank, or their folder, after which the layers are named. Raise
    `InputError` if files cannot be read, or ranks do not belong together.
    """
    files = trace_files(paths)
    traces, run = _read(files)
    name = visible_line(files[0].resolve().parent.name)
    return explain_run(run, name, budget=budget, seed=seed, shares=layer_shares(traces, run))


def read_run(paths: Sequence[PathLike]) -> TracedRun:
    """Read the traces of a pipeline's ranks; see `explain_traces`."""
    return _read(trace_files(paths))[1]


def _read(files: Sequence[PathLike]) -> tuple[list[RankTrace], TracedRun]:
    traces = ordered_traces([read_kineto(file) for file in files])
    return traces, traced_run(traces)


def explain_log(
    path: PathLike, *, budget: Budget, seed: int = 0, num_microbatches: int | None = None
) -> TimersExplained:
    """Read a log of Megatron-LM and explain its timers; see `explain_timers`."""
    timers = read_megatron_log(path, num_microbatches=num_microbatches)
    return explain_timers(timers, visible_line(Path(path).stem), budget=budget, seed=seed)
