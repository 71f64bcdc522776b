"""A current training run of any trainer: degrees, schedule, layout, recomputation and microbatches."""

from __future__ import annotations

from typing import Literal

import msgspec

from pipeloom.bounds import Count, Microbatches, Number
from pipeloom.conversion import check_fields
from pipeloom.errors import InputError
from pipeloom.spec.parallelism import MIXED_PRECISION, Degrees, StateBytes
from pipeloom.spec.strategies import ChunkStrategy, Strategy, chunk_strategy
from pipeloom.spec.trainer import TrainerSpec

RunSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
"""Static schedules by name; `pipeloom.search.schedules` has the orders."""
ONE_STAGE: frozenset[RunSchedule] = frozenset(("1f1b", "zero_bubble"))
"""Schedules for which each rank must have exactly one stage."""
Stage = Number | dict[str, Number]
"""Number of blocks of a stage: of the last module, or of each named module."""


class CurrentRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A current training run. Files and options use these names (docs/compare.md)."""

    tp: Count = 1
    pp: Count = 1
    dp: Count | None = None
    """None: as many replicas as the cluster has devices for."""
    cp: Count = 1
    ep: Count = 1
    etp: Count = 1
    """Devices that share each expert, with expert parallelism."""
    zero: Literal[0, 1, 3] = 1
    schedule: RunSchedule | None = None
    """None: interleaved 1F1B if there are several chunks per rank, else 1F1B."""
    chunks: Count | None = None
    """Stages of each rank; None: as many as ``layout`` has, or one."""
    group: Count | None = None
    """Consecutive microbatches of one stage in interleaved 1F1B; None: as many as there are ranks."""
    layout: tuple[Stage, ...] = ()
    """Blocks of every stage in model order, with stage ``j`` on rank ``j % pp``. A number counts blocks of the last
    module, and then encoders are whole in the first stage. Embeddings are in the first stage, heads in the last. Empty:
    equal numbers."""
    recompute: str | None = None
    """``none``, ``selective``, ``full``, or ``full:0.5`` for a share of each chunk's layers. None: as little as
    fits."""
    microbatch_samples: Count | None = None
    microbatch_tokens: Count | None = None
    """Most tokens of a microbatch, which is filled with samples in order."""
    pad_to: Count | None = None
    """Length to which every sample is padded; None: no padding."""
    microbatches: Microbatches | None = None
    """Number of microbatches of one replica in one iteration."""
    only: RunSchedule | None = None
    """The only one of 1F1B and interleaved 1F1B that other settings of the trainer allow; None: both."""
    rejected: tuple[Strategy, ...] = ()
    """Strategies that other settings of the trainer do not allow."""
    state: StateBytes = MIXED_PRECISION
    trainer: TrainerSpec | None = None
    """Framework whose costs are emulated; None: not known."""
    source: str = ""
    """Source of the description."""
    notes: tuple[str, ...] = ()
    """Differences between the emulation and the run."""

    def __post_init__(self) -> None:
        """Raise `InputError` for combinations that no trainer supports."""
        check_fields(self)
        if self.microbatch_samples is not None and self.microbatch_tokens is not None:
            raise InputError("microbatch_tokens", "is given beside microbatch_samples", "give one of them")
        if len(self.layout) % self.pp:
            raise InputError(
                "layout", f"has {len(self.layout)} stages, not a multiple of pp = {self.pp}", "give one for each stage"
            )
        if self.layout and self.chunks not in (None, len(self.layout) // self.pp):
            raise InputError(
                "chunks",
                f"{self.chunks} a rank, layout has {len(self.layout)} stages for pp = {self.pp}",
                "leave it out",
            )
        if self.group is not None and (self.order != "interleaved" or self.group < self.pp):
            raise InputError(
                "group",
                f"{self.group} microbatches, with schedule {self.order!r} on pp = {self.pp} ranks",
                "leave it out, or use 'interleaved' and at least pp",
            )
        if self.order in ONE_STAGE and self.num_chunks > 1:
            raise InputError(
                "schedule", f"{self.order!r} takes one stage a rank, here are {self.num_chunks}", "use 'interleaved'"
            )
        if self.recompute is not None:
            self.strategy  # noqa: B018  raises if it is invalid

    @property
    def num_chunks(self) -> int:
        """Stages of each rank."""
        return self.chunks or max(1, len(self.layout) // self.pp)

    @property
    def order(self) -> RunSchedule:
        """The schedule, with its default."""
        return self.schedule or ("interleaved" if self.num_chunks > 1 else "1f1b")

    @property
    def strategy(self) -> ChunkStrategy | None:
        """Memory strategy; None: the fastest that fits."""
        if self.recompute is None:
            return None
        try:
            return ChunkStrategy("keep") if self.recompute == "none" else chunk_strategy(self.recompute)
        except InputError as error:
            problem = f"{self.recompute!r} is not a kind of recomputation"
            raise InputError("recompute", problem, "write none, selective, full or full:0.5") from error

    def degrees(self, num_devices: int) -> Degrees:
        """Return the degrees of parallelism on a cluster of ``num_devices``."""
        one = self.tp * self.pp * self.cp
        return Degrees(
            tensor=self.tp,
            pipeline=self.pp,
            data=self.dp or max(1, num_devices // one),
            context=self.cp,
            expert=self.ep,
            expert_tensor=self.etp if self.ep > 1 else 1,
            zero=self.zero,
            state=self.state,
        )
