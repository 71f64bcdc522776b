"""Simulated annealing of the order, settings and samples of one batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeloom.compiled import Array, allocating, kernel
from pipeloom.compiled.random import below, uniform
from pipeloom.tuning.kernels.chain import Chain, Scratch
from pipeloom.tuning.kernels.one_f_one_b import EXTRA, INFEASIBLE, LATE, OVERRUN, run

MOST_EXTRA = 2


class Marginal(NamedTuple):
    """Increase of the fields of `Chain` due to one sample in a microbatch of average size, shape (num_samples, ...)."""

    tokens: Array
    forward: Array
    backward: Array
    activation: Array
    delay: Array
    part_forward: Array
    part_backward: Array
    part_bytes: Array
    part_output: Array


@kernel
def _place(state: Array, num_microbatches: int, ends: int) -> int:
    """Draw a place in the order. Half of the draws are from its ends, which matter most."""
    if below(state, 2) == 0:
        return below(state, num_microbatches)
    offset = below(state, ends)
    return offset if below(state, 2) == 0 else num_microbatches - 1 - offset


@kernel
def _add(chain: Chain, m: int, marginal: Marginal, sample: int, sign: int) -> None:
    """Add a sample to a microbatch (``sign`` 1) or remove it (-1)."""
    for p in range(chain.forward.shape[1]):
        chain.forward[m, p] += sign * marginal.forward[sample, p]
        chain.backward[m, p] += sign * marginal.backward[sample, p]
        chain.activation[m, p] += sign * marginal.activation[sample, p]
        chain.delay[m, p] += sign * marginal.delay[sample, p]
    num_parts = chain.part_start[m + 1] - chain.part_start[m]
    for q in range(chain.part_start[m], chain.part_start[m + 1]):
        chain.part_forward[q] += sign * (marginal.part_forward[sample] // num_parts)
        chain.part_backward[q] += sign * (marginal.part_backward[sample] // num_parts)
        chain.part_bytes[q] += sign * (marginal.part_bytes[sample] // num_parts)
        chain.part_output[q] += sign * (marginal.part_output[sample] // num_parts)


@kernel
def _movable(chain: Chain, m: int, marginal: Marginal, sample: int) -> bool:
    """Return whether a sample can move to a microbatch: images need an encoder part there."""
    return bool(marginal.part_forward[sample] == 0 or chain.part_start[m + 1] > chain.part_start[m])


@kernel
def _exchange(chain: Chain, marginal: Marginal, source: int, target: int, out: int, come: int, sign: int) -> None:
    """Move a sample from one microbatch to another, and ``come`` back unless it is -1. ``sign`` -1 undoes this."""
    _add(chain, source, marginal, out, -sign)
    _add(chain, target, marginal, out, sign)
    if come >= 0:
        _add(chain, target, marginal, come, -sign)
        _add(chain, source, marginal, come, sign)


@allocating
def anneal(
    chain: Chain,
    order: Array,
    settings: Array,
    bin_of: Array,
    marginal: Marginal,
    budget: int,
    scratch: Scratch,
    evaluations: int,
    seed: int,
    tune_samples: bool,
    tune_early: bool,
    tune_late: bool,
    best: int,
    goal: int,
    heat: float,
) -> int:
    """Search order, settings and samples jointly; write the best into the arguments.

    Changes that increase the makespan are accepted too, at first by up to ``heat`` ns. The accepted increase falls to 0
    at the last of ``evaluations``. When samples move, the costs in ``chain`` change by ``marginal`` and become
    estimates. They are not restored at the end. Return the number of runs.
    """
    num_microbatches = len(order)
    num_samples = len(bin_of)
    ends = min(num_microbatches, chain.forward.shape[1])
    state = np.full(1, np.uint64(seed) * np.uint64(2) + np.uint64(0x9E3779B97F4A7C15), np.uint64)
    used = np.zeros(num_microbatches, np.int64)
    count = np.zeros(num_microbatches, np.int64)
    for i in range(num_samples):
        used[bin_of[i]] += marginal.tokens[i]
        count[bin_of[i]] += 1
    trial, changed = order.copy(), settings.copy()
    best_order, best_settings, best_bins = order.copy(), settings.copy(), bin_of.copy()
    present = best
    done = 0
    while done < evaluations and best > goal:
        trial[:] = order
        changed[:] = settings
        out, come, source, target = -1, -1, 0, 0
        kind = below(state, 12)
        if kind < 7 and tune_samples and num_microbatches > 1:
            # Move a sample to another microbatch, or exchange two samples.
            out = below(state, num_samples)
            source = bin_of[out]
            target = order[_place(state, num_microbatches, ends)]
            if kind >= 3:
                come = below(state, num_samples)
                target = bin_of[come]
            if source == target or (come < 0 and count[source] == 1):
                continue
            gain = marginal.tokens[out] - (marginal.tokens[come] if come >= 0 else 0)
            if used[target] + gain > budget or used[source] - gain > budget:
                continue
            if not _movable(chain, target, marginal, out):
                continue
            if come >= 0 and not _movable(chain, source, marginal, come):
                continue
            _exchange(chain, marginal, source, target, out, come, 1)
        elif kind < 10 and num_microbatches > 1:
            a = _place(state, num_microbatches, ends)
            b = below(state, num_microbatches)
            if a == b:
                continue
            if kind == 9:
                trial[a], trial[b] = order[b], order[a]
            else:
                moved = order[a]
                step = 1 if b > a else -1
                k = a
                while k != b:
                    trial[k] = order[k + step]
                    k += step
                trial[b] = moved
        elif kind == 10:
            changed[EXTRA] = below(state, MOST_EXTRA + 1)
        elif tune_early:
            changed[OVERRUN] = 25 * below(state, 5)
            if tune_late and chain.trained:
                changed[LATE] = below(state, 2)
        left = 1.0 - done / evaluations
        ceiling = present + int(heat * left * left * uniform(state))
        makespan, _ = run(chain, trial, changed, scratch, ceiling + 1)
        done += 1
        if makespan == INFEASIBLE or makespan > ceiling:
            if out >= 0:
                _exchange(chain, marginal, source, target, out, come, -1)
            continue
        present = makespan
        order[:] = trial
        settings[:] = changed
        if out >= 0:
            bin_of[out] = target
            used[target] += gain
            used[source] -= gain
            if come >= 0:
                bin_of[come] = source
            else:
                count[source] -= 1
                count[target] += 1
        if present < best:
            best = present
            best_order[:] = order
            best_settings[:] = settings
            best_bins[:] = bin_of
    order[:] = best_order
    settings[:] = best_settings
    bin_of[:] = best_bins
    return done
