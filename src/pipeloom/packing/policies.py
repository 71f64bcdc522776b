"""Packing policies behind one interface: from the loads of a batch's samples to groups of samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import msgspec
import numpy as np

from pipeloom.bounds import Count, Seed
from pipeloom.errors import InputError, check_count
from pipeloom.interruptible import interruptible
from pipeloom.lazy import lazy_module
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
"""Height of the highest bin over the lower bound at which levelling ends: far below what costs are known to."""
_EVEN = 1.01
"""The same at which a packing counts as even."""
_ONE_BY_ONE = 16
"""Numbers of microbatches that are tried one after the other, where samples do not fit into fewer."""
_EFFORT = 1000
_MOST_TRIES = 20_000_000
"""Random exchanges in a packing at most: those of 20,000 microbatches."""
_UNEVEN = 1.1
"""Height up to which full shares may raise a microbatch, in those of the mean one."""


class PackingSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How samples become microbatches."""

    token_budget: Count
    """Backbone tokens of one microbatch at most: text and images, or, where the last module reads videos, theirs."""
    policy: Policy = "planned"
    """Which samples go together; docs/packing.md tells the policies apart."""
    num_microbatches: Count | None = None
    """At least so many microbatches, where the policy can choose; None: as few as the budget allows."""
    attention_tokens: Count | None = None
    """Length at which a sequence's attention costs as much as the rest, for loads without a cost model."""
    seed: Seed = 0

    def __post_init__(self) -> None:
        """Refuse empty budgets and policies that are none."""
        if self.policy not in _POLICIES:
            raise InputError("packing.policy", f"{self.policy!r} is none of {', '.join(_POLICIES)}")
        for name in ("token_budget", "num_microbatches", "attention_tokens"):
            value = getattr(self, name)
            if value is not None:
                check_count(f"packing.{name}", value)


def group(loads: Loads, spec: PackingSpec, iteration: int = 0) -> tuple[tuple[int, ...], ...]:
    """Divide samples into microbatches.

    Parameters
    ----------
    loads : Loads
        Of samples that fit into the budget, each by itself.
    spec : PackingSpec
    iteration : int
        With the seed, the beginning of all that is random.

    Returns
    -------
    tuple of tuple of int
        Positions of the samples of every microbatch, none empty, every sample in exactly one.
    """
    return groups_of(_POLICIES[spec.policy].bins(loads, spec, iteration))


def groups_of(bin_of: IntArray) -> tuple[tuple[int, ...], ...]:
    """Samples of every bin that has any, from the bin of every sample."""
    order = np.argsort(bin_of, kind="stable")
    cuts = np.flatnonzero(np.diff(bin_of[order])) + 1
    return tuple(tuple(part.tolist()) for part in np.split(order, cuts))


def reads_loads(policy: Policy) -> bool:
    """Whether a policy's packing depends on loads, and not on tokens alone."""
    return _POLICIES[policy].reads_loads


def check_always_packs(entity: str, policy: Policy) -> None:
    """Refuse a policy that may end without a packing, for uses that cannot do without one.

    Raises
    ------
    InputError
        It may, or is none at all; ``entity`` is the field that names it.
    """
    if policy not in _POLICIES:
        raise InputError(entity, f"{policy!r} is none of {', '.join(_POLICIES)}")
    if _POLICIES[policy].may_fail:
        raise InputError(entity, f"{policy!r} may not prove a batch, and then has no packing", "use 'balanced'")


def least_microbatches(loads: Loads, spec: PackingSpec) -> int:
    """Microbatches below which no packing can go: by tokens, as wished, and never more than samples."""
    by_tokens = -(-int(loads.tokens.sum()) // spec.token_budget)
    return min(len(loads), max(1, by_tokens, spec.num_microbatches or 1))


def height_bound(load: np.ndarray, num_microbatches: int) -> float:
    """No packing into so many microbatches has a lighter heaviest one: mean, largest sample, largest pair.

    Of the ``num_microbatches + 1`` largest samples two are in one microbatch, at best its two smallest.
    """
    ordered = np.sort(load)[::-1]
    pair = ordered[num_microbatches - 1] + ordered[num_microbatches] if len(load) > num_microbatches else 0.0
    return float(max(load.sum() / num_microbatches, ordered[0], pair))


def assign_bins(
    tokens: IntArray, loads: np.ndarray, budget: int, num_bins: int, seed: int, effort: int = 64, goal: float = _GOAL
) -> IntArray:
    """Even several loads out over bins, as many as asked for and more only where the budget asks for it.

    Longest processing time first, then local search.

    Parameters
    ----------
    tokens : array, shape (num_samples,)
    loads : array, shape (num_dimensions, num_samples)
    budget : int
    num_bins : int
        At least.
    seed : int
    effort : int
        Random exchanges per bin at most where the search is stuck.
    goal : float
        Height of the highest bin over the lower bound at which to end.

    Returns
    -------
    array, shape (num_samples,)
        Bin of every sample.
    """
    bin_of = np.empty(len(tokens), np.int64)
    first, failed = num_bins, num_bins - 1
    while not _place(tokens, loads, budget, num_bins, bin_of):
        failed = num_bins
        # One by one at first, then in ever larger steps, whose last one is bisected.
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
    interruptible(
        len(tokens),
        kernels.level,
        tokens,
        scaled,
        budget,
        num_bins,
        height,
        min(effort * num_bins, _MOST_TRIES),
        seed,
        bin_of,
    )
    return bin_of


def _place(tokens: IntArray, loads: np.ndarray, budget: int, num_bins: int, bin_of: IntArray) -> bool:
    """Place all samples into so many bins, the heaviest first; False: no place was found for one of them."""
    scaled = _scaled(loads, num_bins)
    order = np.argsort(-scaled.max(axis=0), kind="stable")
    if interruptible(len(order), kernels.lightest_fit, order, tokens, scaled, budget, num_bins, num_bins, bin_of) > 0:
        return True
    # Room is short: what packs best by tokens may still do, and is levelled afterwards.
    largest_first = np.argsort(-tokens, kind="stable")
    by_tokens = tokens[None, :].astype(float)
    if (
        interruptible(
            len(largest_first),
            kernels.lightest_fit,
            largest_first,
            tokens,
            by_tokens,
            budget,
            num_bins,
            num_bins,
            bin_of,
        )
        > 0
    ):
        return True
    return bool(interruptible(len(largest_first), kernels.first_fit, largest_first, tokens, budget, bin_of) <= num_bins)


def fill_shares(loads: Loads, budget: int, bin_of: IntArray) -> None:
    """Exchange samples, so that a microbatch's dealt instances are a multiple of the devices; in place.

    The device with most instances is what the others wait for, so each that is missing is paid for. Microbatches get no
    higher than a little above the mean, or than the highest is. Where nothing is dealt they stay as they are.
    """
    if loads.instances is None:
        return
    num_bins = int(bin_of.max()) + 1
    interruptible(
        len(loads),
        kernels.fill,
        loads.tokens,
        _scaled(loads.rows, num_bins),
        loads.instances,
        loads.num_devices,
        budget,
        num_bins,
        _UNEVEN,
        bin_of,
    )


def _scaled(loads: np.ndarray, num_bins: int) -> np.ndarray:
    """Loads in units of the mean bin's; a load that nobody has stays 0."""
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
    """PipeTune's Original: samples in random order, one microbatch filled after the other."""
    bin_of = np.empty(len(loads), np.int64)
    order = np.random.default_rng((spec.seed, iteration)).permutation(len(loads))
    interruptible(len(order), kernels.next_fit, order, loads.tokens, spec.token_budget, bin_of)
    return bin_of


def _algorithm1(loads: Loads, spec: PackingSpec, iteration: int) -> IntArray:
    """PipeTune's Algorithm 1 (section 3.1): longest first, each into the microbatch that is cheapest with it.

    As printed it begins without microbatches. Its line 9 looks for the shortest microbatch with room, in the
    case that none has room: it looks in an empty set, and line 11 opens a new microbatch. So one is opened
    only where no other has room, and microbatches are filled nearly full one after the other. Opened beforehand: as
    many as the tokens need begin empty.
    """
    del iteration
    bin_of = np.empty(len(loads), np.int64)
    opened = 0 if spec.policy == "algorithm1" else least_microbatches(loads, spec)
    order = np.argsort(-loads.tokens, kind="stable")
    limit = len(loads) + opened
    interruptible(
        len(order),
        kernels.lightest_fit,
        order,
        loads.tokens,
        loads.backbone[None, :],
        spec.token_budget,
        opened,
        limit,
        bin_of,
    )
    return bin_of


def _balanced(loads: Loads, spec: PackingSpec, iteration: int) -> IntArray:
    """Longest processing time first with local search; never a heavier microbatch than Algorithm 1's heaviest.

    Where microbatches are so full that the budget, and not the loads, decides what goes where, one more is opened: all
    become lighter, and even.
    """
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
    """Even both loads out: the backbone's and the encoders'."""
    rows = np.stack([loads.backbone, loads.encoder])
    num_bins = least_microbatches(loads, spec)
    return assign_bins(loads.tokens, rows, spec.token_budget, num_bins, spec.seed + iteration, _EFFORT)


def _planned(loads: Loads, spec: PackingSpec, iteration: int) -> IntArray:
    """Where nothing plans, as for `pipeloom pack` alone: even in both loads, and full for all devices."""
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
    """A policy: how it packs, and what must be known of it beforehand."""

    bins: Callable[[Loads, PackingSpec, int], IntArray]
    """From the loads of an iteration's samples to the bin of each."""
    reads_loads: bool = True
    """Whether anything but the samples' tokens decides; only then are loads reckoned from costs."""
    may_fail: bool = False
    """Whether it may give a batch up without a packing, because it wants a proof; training refuses such a policy."""


_POLICIES: dict[Policy, _PolicyEntry] = {
    "first_fit": _PolicyEntry(_first_fit, reads_loads=False),
    "first_fit_decreasing": _PolicyEntry(_first_fit, reads_loads=False),
    "random": _PolicyEntry(_random, reads_loads=False),
    "algorithm1": _PolicyEntry(_algorithm1),
    "algorithm1_opened": _PolicyEntry(_algorithm1),
    "balanced": _PolicyEntry(_balanced),
    "balanced_encoder": _PolicyEntry(_balanced_encoder),
    "exact": _PolicyEntry(_exact, may_fail=True),
    "planned": _PolicyEntry(_planned),
}
