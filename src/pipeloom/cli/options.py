"""What the options of several commands must be."""

from __future__ import annotations

from pipeloom.errors import InputError

_NEVER_S = 1e7


def check_budget(seconds: float) -> None:
    """Refuse a time to search that is none."""
    if not 0 <= seconds <= _NEVER_S:
        raise InputError("--budget", f"{seconds:g} is not between 0 and {_NEVER_S:g} seconds")


def check_seed(seed: int) -> None:
    """Refuse a seed that does not fit where seeds are kept."""
    if not 0 <= seed < 2**63:
        raise InputError("--seed", f"{seed} is not between 0 and 2**63-1")
