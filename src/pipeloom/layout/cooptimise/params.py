"""Everything that tunes the joint search, with defaults chosen on measured models (``docs/notes/cooptimise.md``).

A TOML file of the same names sets any of it: ``pipeloom arrange --params FILE``, `pipeloom.io.read_spec`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pipeloom.bounds import Budget, Count, Factor, Magnitude, Number, Share
from pipeloom.errors import InputError, check_count, check_limit, check_not_negative, check_share
from pipeloom.layout.cooptimise.kernels import MOVES, TUNABLE


class StartParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where walks begin."""

    budget_share: Share = 0.3
    """Part of the budget that may go into trying starts."""
    walked: Count = 4
    """So many of the best starts are walked from, in turns."""
    spreads: tuple[Count, ...] = (2, 3)
    """Keys are also tried at so many times a lone microbatch's times: later chunks then run older microbatches, so that
    unlike chunks keep each other supplied."""
    many_ranks: Count = 16
    """Beyond, annealing moves too few boundaries to balance the loads itself; starts need the best there is."""
    fine_chunks: Count = 3
    """Chunks a rank, at least, of starts that are annealed where memory is ample: they are mostly not the best to begin
    with, but they end best."""
    ample_memory: Magnitude = 1.75
    """Memory is ample at so many times what 1F1B holds."""

    def __post_init__(self) -> None:
        """Refuse starts that are none."""
        check_share("budget_share", self.budget_share)
        for spread in self.spreads:
            check_count("spreads", spread)
        check_count("walked", self.walked)
        check_count("many_ranks", self.many_ranks)
        check_count("fine_chunks", self.fine_chunks)
        check_limit("ample_memory", self.ample_memory)


class TimetableParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Timetables of many ranks (`pipeloom.layout.cooptimise.timetables`); all combinations are tried."""

    ends: tuple[Magnitude, ...] = (1.0, 0.5, 1.5, 0.75, 1.25)
    """How much late begins and early ends count against loads: it depends on the chain which idles least."""
    buffers: tuple[Magnitude, ...] = (0.0, 0.15, 0.25, 0.5)
    """Periods by which microbatches are further ahead at every boundary transfer: stock against whatever is late."""
    waits: tuple[Magnitude, ...] = (0.0, 0.25)
    """How long a rank may wait for the task that is next by timetable, in periods."""
    ahead: Magnitude = 1.25
    """Times the planned microbatches in flight there may be at most, so that early ones do not fill the memory."""

    def __post_init__(self) -> None:
        """Refuse negative times."""
        for name in ("ends", "buffers", "waits"):
            for value in getattr(self, name):
                check_not_negative(name, value)
        check_limit("ahead", self.ahead)


class AnnealParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Annealing of all that may be tuned."""

    hot: Factor = 0.005
    """First temperature, relative to the makespan of the start."""
    cold: Factor = 0.0003
    """Last temperature."""
    most_steps: Count = 1000
    """Proposals between two looks at the clock, fewer where they take long."""
    tasks: Count = 200_000
    """So many tasks are run between two looks at the clock."""
    fewest_steps: Count = 100
    """Fewer than these between two looks leave no time to cool down, nor to refine: such walks begin cold."""
    slow_evaluations: Count = 40_000
    """Evaluations that each of such walks gets at least: where the budget has fewer, there are fewer walks."""

    def __post_init__(self) -> None:
        """Refuse annealing that does not cool."""
        if not 0 < self.cold <= self.hot:
            raise InputError("cold", f"{self.cold:g} is not between 0 and hot, {self.hot:g}")
        for name in ("most_steps", "tasks", "fewest_steps", "slow_evaluations"):
            check_count(name, getattr(self, name))


class RefineParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Refining: the best of some partitions with less on the fullest rank is ordered anew.

    A partition that is better by loads is mostly worse under the order so far, so annealing rejects it.
    """

    partitions: Count = 20
    """Partitions that are tried under the order so far."""
    reach: Share = 0.7
    """How far from the best makespan towards the bound they may aim."""
    steps: Count = 1500
    """Changes of the order of the best of them."""
    stages: Count = 4
    """In so many parts, after each of which it may be given up."""
    heat: Factor = 0.004
    """First temperature of the ordering, relative to the best makespan; the last is a tenth."""
    hope: Magnitude = 0.004
    """How far behind the best it may be for each part that is left."""

    def __post_init__(self) -> None:
        """Refuse refining that does nothing."""
        for name in ("partitions", "steps", "stages"):
            check_count(name, getattr(self, name))
        check_share("reach", self.reach)
        check_limit("hope", self.hope)
        if not self.heat > 0:
            raise InputError("heat", f"{self.heat:g} is not above 0")


class BalanceParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Balancing by loads alone, no order being run (`pipeloom.layout.cooptimise.kernels.balance`)."""

    tries: Count = 40
    """Tries of a move that relieves the fullest rank."""
    exchanges: Count = 100
    """Tries of a move by which single layers change places."""
    steps: Count = 300
    """Changes by which a partition is found."""
    hot: Factor = 0.005
    """First temperature of these, of the largest load."""
    cold: Factor = 0.0005
    """Last temperature."""

    def __post_init__(self) -> None:
        """Refuse balancing that does nothing."""
        for name in ("tries", "exchanges", "steps"):
            check_count(name, getattr(self, name))
        if not 0 < self.cold <= self.hot:
            raise InputError("cold", f"{self.cold:g} is not between 0 and hot, {self.hot:g}")


class BoundParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The lower bound's integer program (`pipeloom.layout.cooptimise.placement_bound`)."""

    most_ranks: Count = 16
    """With more ranks it is left out."""
    most_layers: Count = 1024
    """With more layers it is left out."""
    nodes: Count = 100
    """Nodes, not seconds, end long searches, so that the answer does not depend on the machine."""
    seconds: Budget = 10.0
    """A limit for machines on which nodes take too long; what is proven by then is valid too."""

    def __post_init__(self) -> None:
        """Refuse negative limits."""
        for name in ("most_ranks", "most_layers", "nodes"):
            check_count(name, getattr(self, name))
        check_limit("seconds", self.seconds)


class WalkPhase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One phase of a walk."""

    kind: Literal["anneal", "refine"]
    """``anneal`` changes all that may be tuned; ``refine`` takes better partitions and orders each anew."""
    until: Share
    """Part of the walk's budget after which it ends; the last one goes on to the end."""

    def __post_init__(self) -> None:
        """Refuse phases beyond the end."""
        check_share("until", self.until)


class AgainParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A second round, in which only the best walks go on: many short ones are tried, and few get the rest."""

    walks: Number = 0
    """How many go on; 0: there is one round."""
    share: Share = 0.45
    """Of the budget, for the second round."""
    hot: Factor = 0.004
    """Its first temperature, relative to the makespan that a walk goes on from."""

    def __post_init__(self) -> None:
        """Refuse rounds of nothing."""
        check_not_negative("walks", self.walks)
        check_share("share", self.share)
        if not self.hot > 0:
            raise InputError("hot", f"{self.hot:g} is not above 0")


class CooptimiseParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How partition, placement and schedule are searched."""

    chunks_per_rank: Count = 4
    """Most chunks, per rank."""
    walks: Count = 4
    """Walks, each from a start of its own; at least one a thread."""
    phases: tuple[WalkPhase, ...] = (WalkPhase(kind="anneal", until=0.5), WalkPhase(kind="refine", until=1.0))
    """What a walk does one after the other. Refining is left out where a thousand evaluations take too long, or where
    partition and schedule may not both be tuned."""
    tuned: tuple[str, ...] = TUNABLE
    """What may be tuned, for ablations. Without ``partition`` chunks have equally many layers at the start; without
    ``placement`` there is one stage on each rank; without ``schedule`` backwards go first."""
    starts: StartParams = StartParams()
    timetables: TimetableParams = TimetableParams()
    annealing: AnnealParams = AnnealParams()
    refining: RefineParams = RefineParams()
    balance: BalanceParams = BalanceParams()
    again: AgainParams = AgainParams()
    bound: BoundParams = BoundParams()
    move_weights: dict[str, Magnitude] = {}
    """How often moves are tried, by name, where it shall be otherwise than in the table of moves."""

    def __post_init__(self) -> None:
        """Refuse a search of nothing."""
        for name in ("chunks_per_rank", "walks"):
            check_count(name, getattr(self, name))
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
