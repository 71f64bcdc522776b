"""Bytes at sizes that were not measured are those that a sum over features gives, or more."""

from __future__ import annotations

import numpy as np
import pytest

from pipeloom.cost.fits import FloatArray, aligned, fit_bytes, fit_most, sum_over, workload_features
from pipeloom.spec import Workload

TEXT, IMAGE = np.array((0, 0, 1, 0, 0, -1)), np.array((0, 0, 0, 0, 0, 1))
"""What is left of a sequence without its images, and those."""


def sequences(rng: np.random.Generator, number: int) -> list[Workload]:
    """Of a backbone that an encoder feeds: sequences with more or fewer images in them."""
    found = []
    for _ in range(number):
        lengths = tuple(map(int, rng.integers(3, 60, rng.integers(1, 6))))
        tokens = int(rng.integers(0, sum(lengths)))
        found.append(Workload(lengths, ((int(rng.integers(0, 9)) if tokens else 0, tokens),)))
    return found


def features_of(workloads: list[Workload]) -> FloatArray:
    return aligned([workload_features(workload) for workload in workloads])


@pytest.mark.parametrize("seed", range(10))
def test_sums_are_exact_at_sizes_that_were_not_measured(seed: int) -> None:
    rng = np.random.default_rng(seed)
    per_text, per_image, per_sequence, fixed, per_pair = rng.integers(0, 2, 5) * rng.integers(1, 400, 5)
    truth = per_text * TEXT + per_image * IMAGE + np.array((fixed, per_sequence, 0, per_pair, 0, 0))
    known, new = features_of(sequences(rng, 12)), features_of(sequences(rng, 50))
    fit = np.array(fit_bytes(known, known @ truth))
    assert np.abs(new @ fit - new @ truth).max() < 0.01


def test_sequences_of_one_length_differ_by_what_they_are_given() -> None:
    known = features_of(sequences(np.random.default_rng(0), 12))
    fit = aligned([fit_bytes(known, known @ (128 * TEXT + 8 * IMAGE))])
    few, many = (workload_features(Workload((100,), ((1, tokens),))) for tokens in (10, 90))
    assert sum_over(fit, few) == pytest.approx(128 * 90 + 8 * 10)
    assert sum_over(fit, many) == pytest.approx(128 * 10 + 8 * 90)
    # Profiles of old have no coefficients of what is given, and whoever probes costs need not say it.
    assert sum_over(aligned([(1.0, 0.0, 2.0, 0.0)]), many) == 201
    assert sum_over(fit, (1.0, 1.0, 100.0, 1e4)) == pytest.approx(12800)


@pytest.mark.parametrize("seed", range(10))
def test_which_operation_needs_most_may_depend_on_the_size(seed: int) -> None:
    rng = np.random.default_rng(seed)
    operations = rng.integers(-200, 400, (12, 6)) * np.array((40, 0, 1, 0, 0, 1))
    known, new = (features_of(sequences(rng, number)) for number in (12, 50))
    fit = fit_most(known, (known @ operations.T).tolist())
    assert len(fit) < len(operations)
    said = [sum_over(aligned(fit), tuple(row)).max() for row in new]
    assert said == pytest.approx((new @ operations.T).max(axis=1), abs=0.01)


def turns(lengths: tuple[int, ...]) -> list[float]:
    """Bytes after operations that come sequence by sequence, the last first; as of gradients of split attention."""
    done = np.cumsum((0, *lengths[:0:-1]))
    first = 512 if len(lengths) > 1 else 384
    return [4096.0 + 64 * sum(lengths)] + [
        (first if i < len(lengths) - 1 else 384) * length + 120.0 * before
        for i, (length, before) in enumerate(zip(lengths[::-1], done.tolist(), strict=True))
    ]


@pytest.mark.parametrize("seed", range(20))
def test_what_depends_on_the_order_of_sequences_is_not_less_than_the_worst(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = [tuple(map(int, rng.integers(10, 60, rng.integers(1, 5)))) for _ in range(10)]
    lengths += [(5, 60), (60, 5), (5,)]
    fit = aligned(fit_most(features_of([Workload(each) for each in lengths]), [turns(each) for each in lengths]))
    for _ in range(50):
        new = tuple(map(int, rng.integers(5, 60, rng.integers(1, 6))))
        assert sum_over(fit, workload_features(Workload(new))).max() >= max(turns(new)) - 1e-6


def test_pairs_are_felt_where_a_sequence_is_longer_than_any_that_was_measured() -> None:
    lengths = [(n,) for n in range(10, 50, 5)] + [(n, n) for n in range(10, 50, 5)]
    moments = [[3.0 * max(each) ** 2 + 10.0 * sum(each)] * len(each) for each in lengths]
    fit = aligned(fit_most(features_of([Workload(each) for each in lengths]), moments))
    assert sum_over(fit, workload_features(Workload((90,)))).max() >= 3 * 90**2
