"""`EmulatedStep`: the result of emulating an iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeloom.emulator.rules import IntArray


class StageTask(NamedTuple):
    """Identity of a task of an iteration."""

    module: str
    stage: int
    rank: int
    microbatch: int
    part: int
    backward: bool


@dataclass(frozen=True)
class RankTime:
    """Time of one rank inside the pipeline: total = compute + transfer + bubble - overlap.

    ``transfer_s`` is the time of its sends, ``overlap_s`` the part of them during which it computes, and ``bubble_s``
    the idle time.
    """

    total_s: float
    compute_s: float
    transfer_s: float
    overlap_s: float

    @property
    def bubble_s(self) -> float:
        """Time in which the rank neither computes nor sends."""
        return max(0.0, self.total_s - self.compute_s - self.transfer_s + self.overlap_s)


@dataclass(frozen=True, eq=False)
class EmulatedStep:
    """An emulated iteration.

    Attributes
    ----------
    iteration_s : float
        Seconds of the pipeline, the gradient reduction and the optimizer step.
    pipeline_s : float
        Seconds of the pipeline alone.
    bubble : float
        Idle share of the ranks' computing time inside the pipeline.
    mfu : float
        Operations of matrix products (forward, and twice for the backward) over the peak of all devices.
    peak_bytes, static_bytes : per rank
    ranks : per rank
        Parts of its time, as in AdaPtis Algorithm 1.
    fits : bool
        Whether every peak is within the device's usable memory.
    tasks, start_ps, end_ps : per task
    strategy : str
        Text of a `ChunkStrategy`.
    in_flight : int
        Largest number of microbatches between their first and last task.
    num_tokens : int
        Tokens of the last module's sequences in this replica's microbatches.
    num_devices : int
        Devices of this replica.
    layers : per rank
        First and last layer of every chunk, by module.
    """

    iteration_s: float
    pipeline_s: float
    bubble: float
    mfu: float
    peak_bytes: tuple[int, ...]
    static_bytes: tuple[int, ...]
    ranks: tuple[RankTime, ...]
    fits: bool
    tasks: tuple[StageTask, ...]
    start_ps: IntArray
    end_ps: IntArray
    strategy: str
    in_flight: int
    num_calls: int = 0
    num_tokens: int = 0
    num_devices: int = 1
    layers: tuple[Mapping[str, tuple[tuple[int, int], ...]], ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second and device of this replica."""
        return self.num_tokens / self.iteration_s / self.num_devices


def union(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge overlapping spans, and sort them."""
    out: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def length(spans: Sequence[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in spans)
