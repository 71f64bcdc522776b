"""Packing policies with one interface: from the loads of a batch's samples to the samples of each microbatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import msgspec
import numpy as np

from pipeloom.bounds import Count, Seed
from pipeloom.errors import InputError, check_count, check_seed
from pipeloom.interruptible import interruptible
from pipeloom.lazy import lazy_module
from pipeloom.limits import MAX_SEED
from pipeloom.packing.loads import IntArray, Loads

if TYPE_CHECKING:
    from pipeloom.packing import exact_kernels, kernels
else:
    exact_kernels, kernels = lazy_module("pipeloom.packing.exact_kernels"), lazy_module("pipeloom.packing.kernels")

Policy = Literal[
    "first_fit",
    "first_fit_decreasing",
    "random",
    "algorithm1",
    "algorithm1_opened",
    "balanced",
    "balanced_encoder",
    "exact",
    "planned",
]
POLICIES: tuple[str, ...] = get_args(Policy)

_EXACT_NODES = 5_000_000
_GOAL = 1.0005
"""Local search ends at this height of the highest bin over the lower bound, far below the accuracy of costs."""
_EVEN = 1.01
"""A packing counts as even at this height of the highest bin over the lower bound."""
_ONE_BY_ONE = 16
"""The number of microbatches grows by one for this many steps if samples do not fit, then by larger steps."""
_EFFORT = 1000
_MOST_TRIES = 20_000_000
"""Most random exchanges in a packing: those of 20,000 microbatches."""
_UNEVEN = 1.1
"""Height, in units of the mean microbatch, to which full shares may raise a microbatch."""


class PackingSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How samples are divided into microbatches."""

    token_budget: Count
    """Most backbone tokens of one microbatch: text, images and recordings, or video tokens if the last module reads
    videos. If a sample has `lengths` in the last module, these count."""
    policy: Policy = "planned"
    """Which samples share a microbatch; docs/packing.md describes the policies."""
    num_microbatches: Count | None = None
    """Least number of microbatches, at most the number of samples. First fit, ``random`` and ``algorithm1`` ignore it.
    None: as few as the budget allows."""
    attention_tokens: Count | None = None
    """Length at which a sequence's attention costs as much as the rest, for loads without a cost model."""
    seed: Seed = 0

    def __post_init__(self) -> None:
        """Raise `InputError` for an unknown policy, a count below 1 or a seed that is not an integer of at least 0."""
        if self.policy not in _POLICIES:
            raise InputError("packing.policy", f"{self.policy!r} is none of {', '.join(_POLICIES)}")
        for name in ("token_budget", "num_microbatches", "attention_tokens"):
            value = getattr(self, name)
            if value is not None:
                check_count(f"packing.{name}", value)
        check_seed("packing.seed", self.seed)


def group(loads: Loads, spec: PackingSpec, iteration: int = 0) -> tuple[tuple[int, ...], ...]:
    """Divide samples into microbatches.

    Parameters
    ----------
    loads : Loads
        Loads of samples each of which fits into the budget.
    iteration : int
        Added to the seed of all random choices.

    Returns
    -------
    tuple of tuple of int
        Positions of the samples of each microbatch. None is empty, and every sample is in exactly one.
    """
    entry = _POLICIES[spec.policy]
    bin_of = entry.bins(loads, spec, iteration)
    return samples_of_bins(open_missing(bin_of, loads, spec) if entry.takes_minimum else bin_of)


def open_missing(bin_of: IntArray, loads: Loads, spec: PackingSpec) -> IntArray:
    """Move samples into new bins until there are at least `least_microbatches` bins; return the bins.

    Bins may be missing if samples have no load, or if a tight budget determines the placement. The heaviest samples
    are moved, and no bin is emptied.
    """
    bins, kept = np.unique(bin_of, return_index=True)
    missing = max(0, least_microbatches(loads, spec) - len(bins))
    others = np.setdiff1d(np.arange(len(bin_of)), kept)
    moved = others[np.argsort(-loads.backbone[others], kind="stable")[:missing]]
    bin_of[moved] = bins[-1] + 1 + np.arange(missing)
    return bin_of


def samples_of_bins(bin_of: IntArray) -> tuple[tuple[int, ...], ...]:
    """Return the samples of every non-empty bin, from the bin of every sample."""
    order = np.argsort(bin_of, kind="stable")
    cuts = np.flatnonzero(np.diff(bin_of[order])) + 1
    return tuple(tuple(part.tolist()) for part in np.split(order, cuts))


def reads_loads(policy: Policy) -> bool:
    """Return whether a policy's packing depends on loads, and not on tokens alone."""
    return _POLICIES[policy].reads_loads


def balances(policy: Policy) -> bool:
    """Return whether a policy balances a given number of microbatches; samples may then be moved between them."""
    return _POLICIES[policy].balances


def check_always_packs(entity: str, policy: Policy) -> None:
    """Raise `InputError` if a policy is unknown or may end without a packing.

    ``entity`` is the field that names the policy; its use requires a packing for every batch.
    """
    if policy not in _POLICIES:
        raise InputError(entity, f"{policy!r} is none of {', '.join(_POLICIES)}")
    if _POLICIES[policy].may_fail:
        raise InputError(entity, f"{policy!r} may not prove a batch, and then has no packing", "use 'balanced'")


def least_microbatches(loads: Loads, spec: PackingSpec) -> int:
    """Return the least number of microbatches: by tokens and by ``spec``, and at most the number of samples."""
    by_tokens = -(-int(loads.tokens.sum()) // spec.token_budget)
    return min(len(loads), max(1, by_tokens, spec.num_microbatches or 1))


def height_bound(load: np.ndarray, num_microbatches: int) -> float:
    """Return a lower bound on the heaviest of ``num_microbatches`` microbatches: mean, largest sample, or largest pair.

    Two of the ``num_microbatches + 1`` largest samples share a microbatch, at best the two smallest of them.
    """
    ordered = np.sort(load)[::-1]
    pair = ordered[num_microbatches - 1] + ordered[num_microbatches] if len(load) > num_microbatches else 0.0
    return float(max(load.sum() / num_microbatches, ordered[0], pair))


def assign_bins(
    tokens: IntArray, loads: np.ndarray, budget: int, num_bins: int, seed: int, effort: int = 64, goal: float = _GOAL
) -> IntArray:
    """Balance several loads over at least ``num_bins`` bins, and over more only if the budget needs them.

    Places samples by longest processing time first, then improves the bins by local search.

    Parameters
    ----------
    tokens : array, shape (num_samples,)
    loads : array, shape (num_dimensions, num_samples)
    effort : int
        Most random exchanges per bin when local search is stuck.
    goal : float
        Search ends at this height of the highest bin over the lower bound.

    Returns
    -------
    array, shape (num_samples,)
        Bin of every sample.
    """
    bin_of = np.empty(len(tokens), np.int64)
    first, failed = num_bins, num_bins - 1
    while not _place(tokens, loads, budget, num_bins, bin_of):
        failed = num_bins
        # Steps of one at first, then larger ones; the last step is bisected.
        num_bins += max(1, (num_bins - first) // _ONE_BY_ONE)
    while num_bins - failed > 1:
        middle = (failed + num_bins) // 2
        if _place(tokens, loads, budget, middle, bin_of):
            num_bins = middle
        else:
            failed = middle
            _place(tokens, loads, budget, num_bins, bin_of)
    scaled = _scaled(loads, num_bins)
    height = goal * max(height_bound(row, num_bins) for row in scaled)
    tries = min(effort * num_bins, _MOST_TRIES)
    seed &= MAX_SEED  # The iteration has been added.
    interruptible(len(tokens), kernels.level, tokens, scaled, budget, num_bins, height, tries, seed, bin_of)
    return bin_of


def _place(tokens: IntArray, loads: np.ndarray, budget: int, num_bins: int, bin_of: IntArray) -> bool:
    """Place all samples into this many bins, the heaviest first; return False if a sample does not fit."""
    n = len(tokens)
    # If the budget is tight, the densest packing by tokens may still fit, and is balanced afterwards.
    for rows in (_scaled(loads, num_bins), tokens[None, :].astype(float)):
        order = np.argsort(-rows.max(axis=0), kind="stable")
        if interruptible(n, kernels.lightest_fit, order, tokens, rows, budget, num_bins, num_bins, bin_of) > 0:
            return True
    return bool(interruptible(n, kernels.first_fit, order, tokens, budget, bin_of) <= num_bins)


def fill_shares(loads: Loads, budget: int, bin_of: IntArray) -> None:
    """Exchange samples so that a microbatch's instances are a multiple of the devices; in place.

    All devices wait for the one with the most instances, so every missing instance costs time. No microbatch becomes
    higher than a little above the mean, or than the highest. Without encoder data parallelism nothing changes.
    """
    if loads.instances is None:
        return
    num_bins, instances, devices = int(bin_of.max()) + 1, loads.instances, loads.num_devices
    rows = _scaled(loads.rows, num_bins)
    interruptible(len(loads), kernels.fill, loads.tokens, rows, instances, devices, budget, num_bins, _UNEVEN, bin_of)


def _scaled(loads: np.ndarray, num_bins: int) -> np.ndarray:
    """Return loads in units of the mean bin's load; a load that is 0 for all samples stays 0."""
    mean = loads.sum(axis=1, keepdims=True) / num_bins
    return np.ascontiguousarray(loads / np.where(mean > 0, mean, 1.0))


def _first_fit(loads: Loads, spec: PackingSpec, iteration: int) -> IntArray:
    del iteration
    bin_of = np.empty(len(loads), np.int64)
    decreasing = spec.policy == "first_fit_decreasing"
    order = np.argsort(-loads.tokens, kind="stable") if decreasing else np.arange(len(loads))
    interruptible(len(order), kernels.first_fit, order, loads.tokens, spec.token_budget, bin_of)
    return bin_of


def _random(loads: Loads, spec: PackingSpec, iteration: int) -> IntArray:
    """Pack samples in random order, one microbatch after the other, as PipeTune's Original does."""
    bin_of = np.empty(len(loads), np.int64)
    order = np.random.default_rng((spec.seed, iteration)).permutation(len(loads))
    interruptible(len(order), kernels.next_fit, order, loads.tokens, spec.token_budget, bin_of)
    return bin_of


def _algorithm1(loads: Loads, spec: PackingSpec, iteration: int) -> IntArray:
    """Pack by PipeTune's Algorithm 1 (section 3.1): longest first, each into the microbatch that is cheapest with it.

    As printed, it starts without microbatches. If no microbatch has enough free tokens, its line 9 looks for the
    shortest one that has, in an empty set, and line 11 opens a new one. A microbatch is therefore opened only if no
    other fits, and microbatches are filled nearly full one after the other. The variant ``algorithm1_opened`` starts
    with as many empty microbatches as the tokens need.
    """
    del iteration
    bin_of = np.empty(len(loads), np.int64)
    opened = 0 if spec.policy == "algorithm1" else least_microbatches(loads, spec)
    order = np.argsort(-loads.tokens, kind="stable")
    rows, limit = loads.backbone[None, :], len(loads) + opened
    interruptible(len(order), kernels.lightest_fit, order, loads.tokens, rows, spec.token_budget, opened, limit, bin_of)
    return bin_of


def _balanced(loads: Loads, spec: PackingSpec, iteration: int) -> IntArray:
    """Balance by longest processing time first and local search; never heavier than Algorithm 1's heaviest microbatch.

    If the budget rather than the loads determines the placement because microbatches are full, one more is opened. All
    microbatches become lighter and more even.
    """
    if least_microbatches(loads, spec) == len(loads):
        # Each sample is alone, in the order of the batch.
        return np.arange(len(loads))
    seed = spec.seed + iteration
    rows = loads.backbone[None, :]
    others = [
        _algorithm1(loads, msgspec.structs.replace(spec, policy=policy), iteration)
        for policy in ("algorithm1_opened", "algorithm1")
    ]
    least = _heaviest(others[0], loads.backbone), _heaviest(others[1], loads.backbone)
    num_bins = least_microbatches(loads, spec)
    best = others[int(least[1] < least[0])]
    height = min(least)
    while True:
        mine = assign_bins(loads.tokens, rows, spec.token_budget, num_bins, seed, _EFFORT)
        num_bins = int(mine.max()) + 1
        now = _heaviest(mine, loads.backbone)
        if now < height:
            best, height = mine, now
        even = now <= _EVEN * height_bound(loads.backbone, num_bins)
        if (even and now <= height) or num_bins >= least_microbatches(loads, spec) + 2:
            return best
        num_bins += 1


def _balanced_encoder(loads: Loads, spec: PackingSpec, iteration: int) -> IntArray:
    """Balance two loads: the backbone's and the encoders'."""
    rows = np.stack([loads.backbone, loads.encoder])
    num_bins = least_microbatches(loads, spec)
    return assign_bins(loads.tokens, rows, spec.token_budget, num_bins, spec.seed + iteration, _EFFORT)


def _planned(loads: Loads, spec: PackingSpec, iteration: int) -> IntArray:
    """Pack without a planner, as ``pipeloom pack`` does: balance both loads and fill the shares of all devices."""
    bins = _balanced_encoder(loads, spec, iteration)
    fill_shares(loads, spec.token_budget, bins)
    return bins


def _exact(loads: Loads, spec: PackingSpec, iteration: int) -> IntArray:
    bin_of = _balanced(loads, spec, iteration)
    num_bins = int(bin_of.max()) + 1
    order = np.argsort(-loads.backbone, kind="stable")
    bound = height_bound(loads.backbone, num_bins)
    height, proved = interruptible(
        len(order),
        exact_kernels.branch_and_bound,
        order,
        loads.tokens,
        loads.backbone,
        spec.token_budget,
        num_bins,
        bound,
        _EXACT_NODES,
        bin_of,
    )
    if not proved:
        raise InputError(
            "packing.policy",
            f"'exact' did not prove {len(loads)} samples in {num_bins} microbatches "
            f"({height / bound - 1:.2%} above the bound)",
            "use 'balanced'",
        )
    return bin_of


def _heaviest(bin_of: IntArray, load: np.ndarray) -> float:
    return float(np.bincount(bin_of, weights=load).max())


@dataclass(frozen=True, slots=True)
class _PolicyEntry:
    """A policy: its packing function and properties."""

    bins: Callable[[Loads, PackingSpec, int], IntArray]
    """Maps the loads of an iteration's samples to the bin of each."""
    reads_loads: bool = True
    """Whether the packing depends on anything but the samples' tokens; only then are loads computed from costs."""
    may_fail: bool = False
    """Whether it may fail to pack a batch because it requires a proof; training rejects such policies."""
    balances: bool = False
    """Whether it balances a given number of microbatches; samples may then be moved between them."""
    takes_minimum: bool = True
    """Whether it makes at least ``PackingSpec.num_microbatches`` microbatches."""


_POLICIES: dict[Policy, _PolicyEntry] = {
    "first_fit": _PolicyEntry(_first_fit, reads_loads=False, takes_minimum=False),
    "first_fit_decreasing": _PolicyEntry(_first_fit, reads_loads=False, takes_minimum=False),
    "random": _PolicyEntry(_random, reads_loads=False, takes_minimum=False),
    "algorithm1": _PolicyEntry(_algorithm1, takes_minimum=False),
    "algorithm1_opened": _PolicyEntry(_algorithm1),
    "balanced": _PolicyEntry(_balanced, balances=True),
    "balanced_encoder": _PolicyEntry(_balanced_encoder, balances=True),
    "exact": _PolicyEntry(_exact, may_fail=True),
    "planned": _PolicyEntry(_planned, balances=True),
}
