"""Parameters of the joint search, with defaults tuned on measured models (``docs/notes/cooptimize.md``).

``pipeloom arrange --params FILE`` and `pipeloom.io.read_spec` read them from a TOML file with the same names.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pipeloom.bounds import Budget, Count, Factor, Magnitude, Number, Share
from pipeloom.conversion import check_fields
from pipeloom.errors import InputError, check_not_negative
from pipeloom.layout.cooptimize.kernels.move_table import MOVES, TUNABLE


class _Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    def __post_init__(self) -> None:
        """Raise `InputError` for values outside of the bounds of their types."""
        check_fields(self)


class StartParams(_Params, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Starts of the walks."""

    budget_share: Share = 0.3
    """Fraction of the budget for trying starts."""
    walked: Count = 4
    """Number of best starts that walks begin from, in turn."""
    spreads: tuple[Count, ...] = (2, 3)
    """Multiples of a single microbatch's times at which keys are also tried. Later chunks then run older microbatches,
    so that unequal chunks keep each other supplied."""
    many_ranks: Count = 16
    """Number of ranks above which starts need balanced loads, because annealing moves too few boundaries to balance
    them."""
    fine_chunks: Count = 3
    """Minimum number of chunks per rank of the starts that are annealed if memory is ample. They are rarely the best
    starts, but give the best results."""
    ample_memory: Magnitude = 1.75
    """Memory is ample at this multiple of the peak memory of 1F1B."""


class TimetableParams(_Params, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Timetables for many ranks (`pipeloom.layout.cooptimize.timetables`). All combinations are tried."""

    ends: tuple[Magnitude, ...] = (1.0, 0.5, 1.5, 0.75, 1.25)
    """Weights of late starts and early ends relative to loads. The best weight depends on the chain."""
    buffers: tuple[Magnitude, ...] = (0.0, 0.15, 0.25, 0.5)
    """Number of periods by which microbatches are further ahead at every boundary transfer, as a buffer against
    delays."""
    waits: tuple[Magnitude, ...] = (0.0, 0.25)
    """Maximum number of periods that a rank may wait for the next task of the timetable."""
    ahead: Magnitude = 1.25
    """Maximum number of microbatches in flight, as a multiple of the planned number. The limit keeps early microbatches
    from filling the memory."""


class AnnealParams(_Params, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Annealing of everything that may be tuned."""

    hot: Factor = 0.005
    """First temperature, relative to the makespan of the start."""
    cold: Factor = 0.0003
    """Last temperature, relative to the makespan of the start."""
    most_steps: Count = 1000
    """Maximum number of proposals between two checks of the clock."""
    tasks: Count = 200_000
    """Maximum number of tasks that are run between two checks of the clock."""
    fewest_steps: Count = 100
    """Below this number of proposals between two checks, walks begin cold, because time is too short to cool down or
    refine."""
    slow_evaluations: Count = 40_000
    """Minimum number of evaluations for each walk that begins cold. Smaller budgets have fewer walks."""

    def __post_init__(self) -> None:
        """Raise `InputError` for invalid values."""
        super().__post_init__()
        if not self.cold <= self.hot:
            raise InputError("cold", f"{self.cold:g} is not between 0 and hot, {self.hot:g}")


class RefineParams(_Params, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Refining: the best of several partitions with less load on the fullest rank is reordered.

    A partition with better loads is usually worse under the current order, so annealing rejects it.
    """

    partitions: Count = 20
    """Number of partitions that are tried under the current order."""
    reach: Share = 0.7
    """Maximum fraction of the gap between the best makespan and the bound that a partition may aim to close."""
    steps: Count = 1500
    """Number of changes to the order of the best partition."""
    stages: Count = 4
    """Number of stages of the ordering. It may be abandoned after each stage."""
    heat: Factor = 0.004
    """First temperature of the ordering, relative to the best makespan. The last temperature is a tenth of it."""
    hope: Magnitude = 0.004
    """Maximum distance to the best makespan for each remaining stage, relative to it. A partition beyond it is
    abandoned."""


class BalanceParams(_Params, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Balancing by loads alone, without scheduling (`pipeloom.layout.cooptimize.kernels.balance`)."""

    tries: Count = 40
    """Number of attempts of a move that relieves the fullest rank."""
    exchanges: Count = 100
    """Number of attempts of a move that exchanges single layers."""
    steps: Count = 300
    """Number of changes to find a partition."""
    hot: Factor = 0.005
    """First temperature, relative to the largest load."""
    cold: Factor = 0.0005
    """Last temperature, relative to the largest load."""

    def __post_init__(self) -> None:
        """Raise `InputError` for invalid values."""
        super().__post_init__()
        if not self.cold <= self.hot:
            raise InputError("cold", f"{self.cold:g} is not between 0 and hot, {self.hot:g}")


class BoundParams(_Params, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The lower bound's integer program (`pipeloom.layout.cooptimize.placement_bound`)."""

    most_ranks: Count = 16
    """The program is skipped for more ranks."""
    most_layers: Count = 1024
    """The program is skipped for more layers."""
    nodes: Count = 100
    """Maximum number of nodes. A limit on nodes, unlike one on time, gives the same answer on every machine."""
    seconds: Budget = 10.0
    """Time limit for slow machines, in s. The bound proven by then is still valid. A search whose budget counts only
    evaluations does not stop at the program's bound, so that it gives the same result on every machine."""


class WalkPhase(_Params, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One phase of a walk."""

    kind: Literal["anneal", "refine"]
    """``anneal`` changes everything that may be tuned. ``refine`` takes better partitions and reorders each."""
    until: Share
    """Fraction of the walk's budget at which the phase ends. The last phase continues to the end."""


class AgainParams(_Params, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A second round in which only the best walks continue: many short walks are tried, and few get the rest."""

    walks: Number = 0
    """Number of walks that continue. 0 disables the second round."""
    share: Share = 0.45
    """Fraction of the budget for the second round."""
    hot: Factor = 0.004
    """First temperature of the second round, relative to the makespan from which a walk continues."""


class CooptimizeParams(_Params, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of the joint search of partition, placement and schedule."""

    chunks_per_rank: Count = 4
    """Maximum number of chunks per rank."""
    walks: Count = 4
    """Number of walks, each with its own start; at least one per thread."""
    phases: tuple[WalkPhase, ...] = (WalkPhase(kind="anneal", until=0.5), WalkPhase(kind="refine", until=1.0))
    """Consecutive phases of a walk. Refining is skipped if a thousand evaluations take too long, or if partition and
    schedule may not both be tuned."""
    tuned: tuple[str, ...] = TUNABLE
    """Parts that may be tuned, for ablations. Without ``partition``, chunks start with equal numbers of layers. Without
    ``placement``, each rank has one stage. Without ``schedule``, backwards run first."""
    starts: StartParams = StartParams()
    timetables: TimetableParams = TimetableParams()
    annealing: AnnealParams = AnnealParams()
    refining: RefineParams = RefineParams()
    balance: BalanceParams = BalanceParams()
    again: AgainParams = AgainParams()
    bound: BoundParams = BoundParams()
    move_weights: dict[str, Magnitude] = {}
    """Frequencies of moves that differ from those of the table of moves, by name."""

    def __post_init__(self) -> None:
        """Raise `InputError` for invalid values."""
        super().__post_init__()
        if not self.phases:
            raise InputError("phases", "are none", "give at least one of anneal and refine")
        for part in self.tuned:
            if part not in TUNABLE:
                raise InputError("tuned", f"{part!r} is unknown", f"use some of {', '.join(TUNABLE)}")
        known = [move.name for move in MOVES]
        for name, weight in self.move_weights.items():
            if name not in known:
                raise InputError(f"move_weights.{name}", "is no move", f"use one of {', '.join(known)}")
            check_not_negative(f"move_weights.{name}", weight)
