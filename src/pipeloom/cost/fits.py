"""Fits over features of workloads: seconds, which are noisy, and bytes, which are exact sums."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pipeloom.limits import NUM_OWN_FEATURES
from pipeloom.spec import Workload

FloatArray = npt.NDArray[np.float64]

Coefficients = tuple[float, ...]
"""Coefficients of: one, instances, tokens, token pairs; then, for each module that feeds it, instances and tokens from
that module. Missing ones are 0."""

_TOKENS, _PAIRS = 2, 3
_WHOLE = 1e-9
"""Relative error below which a fit of bytes counts as exact."""
_MOST_FEATURES = 5
"""Largest number of features of an exact sum."""


def workload_features(workload: Workload) -> Coefficients:
    """Return the features of a workload in the order of `Coefficients`."""
    own = workload.num_instances, workload.num_tokens, workload.num_token_pairs
    return (1.0, *map(float, own), *(float(number) for given in workload.given for number in given))


def aligned(rows: Sequence[Sequence[float]], num: int = 0) -> FloatArray:
    """Stack rows of coefficients or features, shape (len(rows), at least ``num``), padded with 0."""
    out = np.zeros((len(rows), max([num, *map(len, rows)])))
    for line, row in zip(out, rows, strict=True):
        line[: len(row)] = row
    return out


def sum_over(coefficients: FloatArray, features: Coefficients) -> FloatArray:
    """Return the sums, shape (num_rows,), of coefficients of shape (num_rows, num_features)."""
    num = min(coefficients.shape[-1], len(features))
    sums: FloatArray = coefficients[:, :num] @ np.array(features[:num])
    return sums


def fit_seconds(features: FloatArray, target: FloatArray) -> Coefficients:
    """Fit seconds by least squares on relative errors with nonnegative coefficients of the workload's own features."""
    return _nonnegative_fit(features[:, :NUM_OWN_FEATURES], target)


def fit_bytes(features: FloatArray, target: FloatArray) -> Coefficients:
    """Fit bytes: exactly if they are a sum over features, else so that no measurement exceeds the fit.

    Plans use the fit as a limit. Coefficients of an exact fit may be negative: for example, text is a sequence minus
    its images.
    """
    (exact,) = _exact_fits(features, target[:, None])
    return _covering_fit(features, target) if exact is None else exact


def fit_most(features: FloatArray, moments: Sequence[Sequence[float]]) -> tuple[Coefficients, ...]:
    """Fit the peak bytes of a computation as the largest of several sums.

    If every workload runs the same operations, bytes after each operation are sums over features, and their maximum is
    exact at any size, even if different operations are the peak. Otherwise, for example if operations run sequence by
    sequence, fit the measured peak. If that is not a sum either, use the worst measurement per token and per pair. The
    result is never less than on the smallest workload.

    Parameters
    ----------
    features : array, shape (num_workloads, num_features)
    moments : sequence of sequence of float
        Bytes after each operation, for every workload.
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
    # Tokens alone would be too low for sequences longer than all measured ones, and pairs for shorter ones.
    covers: list[Coefficients] = [(smallest,)]
    for columns in ([_TOKENS], [_TOKENS, _PAIRS]):
        over = np.zeros(NUM_OWN_FEATURES)
        over[columns] = _covering_fit(features[sizes > 0][:, columns], most[sizes > 0])
        covers.append(_coefficients(over))
    return _undominated(covers)


def _likely_first(num: int) -> Sequence[int]:
    """Return features in the order in which they are tried. With few workloads, several sums are exact."""
    if num < NUM_OWN_FEATURES:
        return range(num)
    # Tokens and a constant, pairs, instances; then tokens from other modules, and their numbers of sequences.
    return (_TOKENS, 0, _PAIRS, 1, *range(NUM_OWN_FEATURES + 1, num, 2), *range(NUM_OWN_FEATURES, num, 2))


def _exact_fits(features: FloatArray, targets: FloatArray) -> list[Coefficients | None]:
    """Return the exact sum over the fewest features for each column of targets; None if there is none.

    Negative coefficients are accepted only if there are more workloads than features, so that one confirms them.
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
                # Bytes of a token are integers or simple fractions, for example if four patches become one token.
                fit[columns] = np.round(solution[:, i] / scale[columns], 6)
                found[missing[i]] = _coefficients(fit)
    return found


def _undominated(fits: Sequence[Coefficients]) -> tuple[Coefficients, ...]:
    """Return the fits that can be the largest, since no feature is negative."""
    rows = np.unique(aligned(fits), axis=0)
    return tuple(
        _coefficients(row)
        for i, row in enumerate(rows)
        if not any((row <= rows[j]).all() for j in range(len(rows)) if j != i)
    )


def _covering_fit(features: FloatArray, target: FloatArray) -> Coefficients:
    """Fit bytes and scale the fit so that no measurement exceeds it, because plans use it as a limit.

    Measurements of 0 bytes are excluded: errors relative to 0 would outweigh all others, and a fit of 0 cannot be
    scaled.
    """
    some = target > 0
    if not some.any():
        return _coefficients(np.zeros(features.shape[1]))
    features, target = features[some], target[some]
    fit = np.array(_nonnegative_fit(features, target))
    # Measurements with bytes although their features are 0, such as tokens of an empty sequence.
    fit[0] += target[features @ fit <= 0].max(initial=0.0)
    fit *= max(1.0, float((target / (features @ fit)).max()))
    return _coefficients(fit)


def _nonnegative_fit(features: FloatArray, target: FloatArray) -> Coefficients:
    """Fit by least squares on relative errors with nonnegative coefficients.

    All subsets of the features are tried. This is exact and needs no solver.
    """
    num = features.shape[1]
    weight = 1.0 / np.maximum(target, max(float(target.max()) * 1e-3, 1e-12))
    rows, goal = features * weight[:, None], target * weight
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    best, best_error = np.zeros(num), float(goal @ goal)
    # For an exact sum, one more feature would fit rounding errors, and extrapolate wrongly.
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
            # One more feature must reduce the error clearly, or it would extrapolate noise.
            if error < best_error * (1 - 1e-3):
                best, best_error = candidate, error
    return _coefficients(best)


def _coefficients(values: FloatArray) -> Coefficients:
    listed: list[float] = values.tolist()
    return tuple(listed)
