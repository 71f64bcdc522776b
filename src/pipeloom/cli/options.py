"""Checks and help texts of options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeloom import errors
from pipeloom.errors import InputError
from pipeloom.limits import MAX_SEED, MAX_THREADS, MAX_WAIT_S
from pipeloom.spec.precision import PRECISIONS

if TYPE_CHECKING:
    from pipeloom.search import SearchParams

CLUSTER_HELP = "A description (64xH100, '2x8xB200 ib400'), a cluster of the zoo, or a .toml file."
FREEZE_HELP = "A module that is not trained; can be repeated."
TRAINER_HELP = (
    "Trainer whose costs are emulated: fused, megatron, torchtitan, pipeloom, or a .toml file. A precision may follow: "
    f"'megatron mxfp8'; {', '.join(PRECISIONS)}."
)
PARAMS_HELP = "A TOML or JSON file with search parameters to change, one table per group."


def check_budget(seconds: float) -> None:
    """Raise `InputError` for a search time out of range."""
    if not 0 <= seconds <= MAX_WAIT_S:
        raise InputError("--budget", f"{seconds:g} is not between 0 and {MAX_WAIT_S:g} seconds")


def check_seed(seed: int) -> None:
    """Raise `InputError` for a seed out of range."""
    errors.check_seed("--seed", seed, MAX_SEED)


def check_threads(threads: int) -> None:
    """Raise `InputError` for a number of threads out of range."""
    if not 0 <= threads <= MAX_THREADS:
        problem = "is negative" if threads < 0 else f"is above {MAX_THREADS}"
        raise InputError("--threads", f"{threads} {problem}", "use 0 for half of the cores")


def check_method(entity: str, name: str) -> None:
    """Raise `InputError` for a search method that is not installed."""
    from pipeloom.search import find_method

    find_method(name, entity)


def read_params(path: Path | None) -> SearchParams:
    """Read search parameters from a file; return the defaults if there is no file."""
    from pipeloom.io import read_spec
    from pipeloom.search import SearchParams

    return SearchParams() if path is None else read_spec(path, SearchParams)
