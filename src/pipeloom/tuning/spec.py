"""TuningSpec: which of PipeTune's techniques are used, each switched by one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from pipeloom.bounds import Count, Factor
from pipeloom.errors import InputError
from pipeloom.packing import Policy, check_always_packs

MicroBatch = Literal["fixed", "multiples", "any"]
Order = Literal["given", "clusters", "search"]
Precompute = Literal["off", "frozen", "all"]


class TuningSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is tuned for every batch. The defaults are the best that there is.

    Every technique alone changes only when work is done, never what is computed.
    """

    pack: Policy = "balanced"
    """How samples become microbatches of a given size."""
    micro_batch: MicroBatch = "any"
    """``fixed``: as large as the token budget allows. ``multiples``: of ``unit_tokens``, as PipeTune. ``any``: so many
    microbatches as are best."""
    order: Order = "search"
    """``given``: as packed. ``clusters``: PipeTune's, permutations of at most six clusters of like microbatches.
    ``search``: local search on the order itself; a planner then spends its budget on orders beyond 1F1B."""
    precompute: Precompute = "all"
    """Encoder work of later microbatches in idle time of the first rank: none, of frozen encoders, or of trained ones
    too, whose backwards then wait for idle time as well."""
    unit_tokens: Count | None = None
    """Tokens of the smallest microbatch of ``multiples`` (the context length); None: the longest sample."""
    effort: Factor = 1.0
    """Share of the usual number of simulations; more takes longer."""

    def __post_init__(self) -> None:
        """Refuse impossible sizes, and a packing that may fail to be found in time."""
        check_always_packs("tuning.pack", self.pack)
        if self.unit_tokens is not None and self.unit_tokens < 1:
            raise InputError("tuning.unit_tokens", f"{self.unit_tokens} is below 1")
        if not 0 < self.effort < 1e6:
            raise InputError("tuning.effort", f"{self.effort} is not above 0 and below 1000000")

    @property
    def searches(self) -> bool:
        """Whether orders are searched, as for any batch: these settings then only say where the search begins."""
        return self.order == "search"

    def check_choices(self, strategies: Sequence[str], split_backward: bool) -> None:
        """Refuse memory strategies to choose from, and split backwards, where orders are PipeTune's alone.

        Raises
        ------
        InputError
            Its recurrence times 1F1B of one strategy.
        """
        if not self.searches and (len(strategies) > 1 or split_backward):
            raise InputError(
                "planner.split_backward" if split_backward else "planner.strategies",
                f"offers a choice, and tuning.order = {self.order!r} plans 1F1B, which makes none",
                "leave it out, give one strategy, or let tuning.order be 'search'",
            )
