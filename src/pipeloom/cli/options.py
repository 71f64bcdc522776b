"""What the options of several commands must be."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeloom.errors import InputError
from pipeloom.limits import MAX_MICROBATCHES, MAX_SEED, MAX_THREADS, MAX_WAIT_S

if TYPE_CHECKING:
    from pipeloom.search import SearchParams

FREEZE_HELP = "A module that is not trained; may be given again for others."
PARAMS_HELP = "Parameters of the search, TOML or JSON: a table for each group, with what it changes."

MOST_MICROBATCHES = MAX_MICROBATCHES


def check_budget(seconds: float) -> None:
    """Refuse a time to search that is none."""
    if not 0 <= seconds <= MAX_WAIT_S:
        raise InputError("--budget", f"{seconds:g} is not between 0 and {MAX_WAIT_S:g} seconds")


def check_seed(seed: int) -> None:
    """Refuse a seed that does not fit where seeds are kept."""
    if not 0 <= seed <= MAX_SEED:
        raise InputError("--seed", f"{seed} is not between 0 and 2**63-1")


def check_threads(threads: int) -> None:
    """Refuse a number of threads that no machine has."""
    if not 0 <= threads <= MAX_THREADS:
        problem = "is negative" if threads < 0 else f"is above {MAX_THREADS}"
        raise InputError("--threads", f"{threads} {problem}", "use 0 for half of the cores")


def check_method(entity: str, name: str) -> None:
    """Refuse a search method that no installed distribution has."""
    from pipeloom.search import find_method

    find_method(name, entity)


def read_params(path: Path | None) -> SearchParams:
    """Parameters of the search from a file; the defaults where none is given."""
    from pipeloom.io import read_spec
    from pipeloom.search import SearchParams

    return SearchParams() if path is None else read_spec(path, SearchParams)
