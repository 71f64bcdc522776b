"""TuningSpec: selection of PipeTune's techniques."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from pipeloom.bounds import Count, Factor
from pipeloom.errors import InputError, check_count
from pipeloom.packing import Policy, check_always_packs

MicroBatch = Literal["fixed", "multiples", "any"]
Order = Literal["given", "clusters", "search"]
Precompute = Literal["off", "frozen", "all"]


class TuningSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Selection of the techniques that tune every batch. The defaults are the fastest settings.

    No technique changes what is computed, only when.
    """

    pack: Policy = "balanced"
    """Policy that packs samples into microbatches of a given size."""
    micro_batch: MicroBatch = "any"
    """``fixed``: microbatches as large as the token budget allows. ``multiples``: multiples of ``unit_tokens``, as in
    PipeTune. ``any``: the best number of microbatches."""
    order: Order = "search"
    """``given``: the order of the packing. ``clusters``: permutations of at most six clusters of similar microbatches,
    as in PipeTune. ``search``: local search on the order; a planner then spends its budget on orders beyond 1F1B."""
    precompute: Precompute = "all"
    """Encoder work of later microbatches that runs in idle time of the first rank: none (``off``), that of frozen
    encoders (``frozen``), or also that of trained encoders (``all``), whose backwards are then delayed to idle time."""
    unit_tokens: Count | None = None
    """Unit of ``multiples`` in tokens (the context length). None: the longest sample."""
    effort: Factor = 1.0
    """Factor of the default number of simulations."""

    def __post_init__(self) -> None:
        """Raise `InputError` for invalid values, or for a policy that may not find a packing in time."""
        check_always_packs("tuning.pack", self.pack)
        if self.unit_tokens is not None:
            check_count("tuning.unit_tokens", self.unit_tokens)
        if not 0 < self.effort < 1e6:
            raise InputError("tuning.effort", f"{self.effort} is not above 0 and below 1000000")

    @property
    def searches(self) -> bool:
        """Whether orders are searched. These settings then only determine the start of the search."""
        return self.order == "search"

    def check_choices(self, strategies: Sequence[object], split_backward: bool) -> None:
        """Raise `InputError` for strategy choices or split backwards if orders are not searched.

        Raises
        ------
        InputError
            The recurrence supports only 1F1B with one strategy.
        """
        if not self.searches and (len(strategies) > 1 or split_backward):
            raise InputError(
                "planner.split_backward" if split_backward else "planner.strategies",
                f"needs a search of orders, which tuning.order = {self.order!r} disables",
                "remove it, use one strategy, or let tuning.order be 'search'",
            )
