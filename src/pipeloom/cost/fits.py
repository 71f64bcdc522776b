"""Fits over the features of workloads: seconds, which are noisy, and bytes, which are exact sums."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pipeloom.limits import NUM_OWN_FEATURES
from pipeloom.spec import Workload

FloatArray = npt.NDArray[np.float64]

Coefficients = tuple[float, ...]
"""Of one, instances, tokens, token pairs; then, of every module that feeds it, instances and tokens given. Those that
are missing are 0."""

_TOKENS, _PAIRS = 2, 3
_WHOLE = 1e-9
"""Relative: bytes that are fitted so well are fitted exactly."""
_MOST_FEATURES = 5
"""Of an exact sum."""


def workload_features(workload: Workload) -> Coefficients:
    """What costs are sums over, as `Coefficients` has them."""
    own = workload.num_instances, workload.num_tokens, workload.num_token_pairs
    return (1.0, *map(float, own), *(float(number) for given in workload.given for number in given))


def aligned(rows: Sequence[Sequence[float]], num: int = 0) -> FloatArray:
    """Coefficients or features under one another, shape (len(rows), at least ``num``); what is missing is 0."""
    out = np.zeros((len(rows), max([num, *map(len, rows)])))
    for line, row in zip(out, rows, strict=True):
        line[: len(row)] = row
    return out


def sum_over(coefficients: FloatArray, features: Coefficients) -> FloatArray:
    """The sums, shape (num_rows,), of coefficients of shape (num_rows, num_features)."""
    num = min(coefficients.shape[-1], len(features))
    sums: FloatArray = coefficients[:, :num] @ np.array(features[:num])
    return sums


def fit_seconds(features: FloatArray, target: FloatArray) -> Coefficients:
    """Least squares on relative errors with coefficients of at least zero, over what the workload itself has."""
    return _nonnegative_fit(features[:, :NUM_OWN_FEATURES], target)


def fit_bytes(features: FloatArray, target: FloatArray) -> Coefficients:
    """Fit bytes: exactly where they are a sum over features, else raised so far that no measurement is above it.

    Plans are held to them. Coefficients of an exact fit may be negative: text is what is left of a sequence without
    its images.
    """
    (exact,) = _exact_fits(features, target[:, None])
    return _covering_fit(features, target) if exact is None else exact


def fit_most(features: FloatArray, moments: Sequence[Sequence[float]]) -> tuple[Coefficients, ...]:
    """Fit the most that lives during a computation: the largest of these sums.

    Where every workload runs the same operations, bytes after each of them are sums over features, and their maximum
    is exact at any size: which operation needs most may depend on it. Else, as where operations are run sequence by
    sequence, it is the most that was measured; where that is no sum either, the worst that was, per token and per pair;
    and never less than on the smallest workload.

    Parameters
    ----------
    features : array, shape (num_workloads, num_features)
    moments : sequence of sequence of float
        Of every workload, bytes after each operation.
    """
    if len({len(row) for row in moments}) == 1:
        fits = _exact_fits(features, np.unique(np.array(moments, dtype=float), axis=1))
        exact = [fit for fit in fits if fit is not None]
        if len(exact) == len(fits):
            return _undominated(exact)
    most = np.array([max(row) for row in moments], dtype=float)
    sizes = features[:, _TOKENS]
    smallest = float(most[sizes == sizes.min()].max())
    (whole,) = _exact_fits(features, most[:, None])
    if whole is not None:
        return _undominated([(smallest,), whole])
    # Tokens alone would fall short where a sequence is longer than any that was measured, with pairs where all are
    # shorter.
    covers: list[Coefficients] = [(smallest,)]
    for columns in ([_TOKENS], [_TOKENS, _PAIRS]):
        over = np.zeros(NUM_OWN_FEATURES)
        over[columns] = _covering_fit(features[sizes > 0][:, columns], most[sizes > 0])
        covers.append(_coefficients(over))
    return _undominated(covers)


def _likely_first(num: int) -> Sequence[int]:
    """Features in the order in which they are tried: where few workloads were measured, several sums are exact."""
    if num < NUM_OWN_FEATURES:
        return range(num)
    # Tokens and a constant, pairs, instances; then tokens that are given, and how many sequences they are.
    return (_TOKENS, 0, _PAIRS, 1, *range(NUM_OWN_FEATURES + 1, num, 2), *range(NUM_OWN_FEATURES, num, 2))


def _exact_fits(features: FloatArray, targets: FloatArray) -> list[Coefficients | None]:
    """Of every column of targets, the sum over fewest features that it is; None: it is none.

    Coefficients below zero count only where there are more workloads than features, so that something confirms them.
    """
    num = features.shape[1]
    scale = np.maximum(np.abs(features).max(axis=0), 1e-300)
    bound = _WHOLE * np.abs(targets).max(axis=0)
    found: list[Coefficients | None] = [None if most else (0.0,) * num for most in bound]
    for size in range(1, min(num, len(features), _MOST_FEATURES) + 1):
        for subset in itertools.combinations(_likely_first(num), size):
            missing = [i for i, fit in enumerate(found) if fit is None]
            if not missing:
                return found
            columns, wanted = list(subset), targets[:, missing]
            part = features[:, columns] / scale[columns]
            solution, _, rank, _ = np.linalg.lstsq(part, wanted, rcond=None)
            if rank < size:
                continue
            exact = (np.abs(part @ solution - wanted) <= bound[missing]).all(axis=0)
            exact &= (solution >= -bound[missing]).all(axis=0) | (len(np.unique(part, axis=0)) > size)
            for i in np.flatnonzero(exact).tolist():
                fit = np.zeros(num)
                # Bytes of a token are whole numbers or simple fractions, as where four patches become one token.
                fit[columns] = np.round(solution[:, i] / scale[columns], 6)
                found[missing[i]] = _coefficients(fit)
    return found


def _undominated(fits: Sequence[Coefficients]) -> tuple[Coefficients, ...]:
    """Those that may be the largest, as no feature is below zero."""
    rows = np.unique(aligned(fits), axis=0)
    return tuple(
        _coefficients(row)
        for i, row in enumerate(rows)
        if not any((row <= rows[j]).all() for j in range(len(rows)) if j != i)
    )


def _covering_fit(features: FloatArray, target: FloatArray) -> Coefficients:
    """Fit bytes: raised so far that none of the measurements is above it, since plans are held to them.

    Measurements of nothing are left out: errors relative to nothing outweigh all others, and a fit of nothing at all,
    which they would bring about, cannot be raised.
    """
    some = target > 0
    if not some.any():
        return _coefficients(np.zeros(features.shape[1]))
    features, target = features[some], target[some]
    fit = np.array(_nonnegative_fit(features, target))
    # What takes bytes though all that the fit is of is nothing, as tokens of an empty sequence.
    fit[0] += target[features @ fit <= 0].max(initial=0.0)
    fit *= max(1.0, float((target / (features @ fit)).max()))
    return _coefficients(fit)


def _nonnegative_fit(features: FloatArray, target: FloatArray) -> Coefficients:
    """Least squares on relative errors with coefficients of at least zero.

    All subsets of the features are tried: exact, and no solver is needed.
    """
    num = features.shape[1]
    weight = 1.0 / np.maximum(target, max(float(target.max()) * 1e-3, 1e-12))
    rows, goal = features * weight[:, None], target * weight
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    best, best_error = np.zeros(num), float(goal @ goal)
    # Of what is an exact sum, a further feature would fit the rounding, and go astray on other workloads.
    exact = 1e-12 * best_error
    for size in range(1, num + 1):
        for subset in itertools.combinations(_likely_first(num), size):
            if best_error <= exact:
                break
            columns = list(subset)
            solution = np.linalg.lstsq(rows[:, columns] / scale[columns], goal, rcond=None)[0]
            if (solution < 0).any():
                continue
            candidate = np.zeros(num)
            candidate[columns] = solution / scale[columns]
            residual = rows @ candidate - goal
            error = float(residual @ residual)
            # A further feature must earn its place, or noise would be extrapolated.
            if error < best_error * (1 - 1e-3):
                best, best_error = candidate, error
    return _coefficients(best)


def _coefficients(values: FloatArray) -> Coefficients:
    listed: list[float] = values.tolist()
    return tuple(listed)
