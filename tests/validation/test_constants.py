"""Constants fitted to published runs: the fit, refits without some runs, and what is recorded."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from pipeloom.spec.catalog import load_cluster, load_trainer
from pipeloom.validation import chance, interval, predict, published_device, read_runs
from pipeloom.validation.confidence import pairs, residuals, sign_curve
from pipeloom.validation.constants import (
    FittedRun,
    constants,
    fitted_ids,
    fitted_runs,
    refit,
    shipped,
    values_without,
    with_values,
)
from pipeloom.validation.express import express
from tests.validation.test_runs import DATA, LLAMA


def made(errors: list[float], slopes: np.ndarray, source: str = "s") -> list[FittedRun]:
    return [
        FittedRun(f"{source}{i}", f"{source}{i}", "d", "m", "dense", error, tuple(row))
        for i, (error, row) in enumerate(zip(errors, slopes.tolist(), strict=True))
    ]


def test_without_runs_the_constants_are_their_priors() -> None:
    found = refit([], shipped())
    assert found == pytest.approx({one.name: one.prior for one in constants()})


def test_a_fit_finds_the_constants_that_made_the_errors() -> None:
    rng = np.random.default_rng(3)
    every = constants()
    start = {one.name: one.prior for one in every}
    slopes = rng.normal(size=(4000, len(every)))
    moves = rng.uniform(-0.1, 0.1, len(every))
    found = refit(made((slopes @ moves).tolist(), slopes), start)
    for one, move in zip(every, moves, strict=True):
        assert one.to_line(found[one.name]) - one.to_line(one.prior) == pytest.approx(move, abs=0.01)


def test_single_wrong_runs_hardly_move_a_fit() -> None:
    rng = np.random.default_rng(4)
    slopes = rng.normal(size=(400, len(constants())))
    errors = rng.normal(scale=0.02, size=400)
    found = refit(made(errors.tolist(), slopes), shipped())
    errors[:8] += 2.0
    moved = refit(made(errors.tolist(), slopes), shipped())
    for one in constants():
        assert one.to_line(moved[one.name]) == pytest.approx(one.to_line(found[one.name]), abs=0.03)


def test_constants_change_only_the_runs_they_belong_to() -> None:
    expressed = express(LLAMA)
    base = expressed.predict()[0]
    for name in ("ampere.sustained", "torch.elementwise", "hidden_reduction"):
        other = with_values(expressed, {**shipped(), name: shipped()[name] * 0.9})
        assert other.predict()[0] == base
    slower = with_values(expressed, {**shipped(), "hopper.sustained": shipped()["hopper.sustained"] * 0.9})
    assert slower.predict()[0] > 1.04 * base


def test_recorded_errors_are_those_of_the_emulator() -> None:
    table = {run.id: run for run in read_runs(DATA)}
    recorded = {run.id: run.error for run in fitted_runs()}
    for name in random.Random(2).sample(sorted(recorded), 8):
        found = predict(table[name])
        assert found.fitted
        assert found.error is not None
        assert math.log1p(found.error) == pytest.approx(-recorded[name], abs=1e-3), name
    without = {one.id: one.without_device for one in residuals()}
    for name in random.Random(3).sample(sorted(without), 4):
        found = predict(table[name], "device")
        assert not found.fitted
        assert found.error is not None
        assert math.log1p(found.error) == pytest.approx(-without[name], abs=2e-3), name


def test_runs_that_are_held_or_implausible_are_not_fitted() -> None:
    table = {run.id: run for run in read_runs(DATA)}
    assert len(fitted_ids()) > 300
    for name in fitted_ids():
        run = table[name]
        assert run.split == "open"
        assert not run.flag
        assert run.source != "megatron-golden"
    assert not predict(LLAMA).fitted


def test_errors_on_runs_that_were_not_fitted_do_not_get_worse() -> None:
    """Medians of the absolute errors, each run predicted without its source's runs of its model."""
    for kind, bound in (("dense", 0.055), ("experts", 0.235)):
        errors = [abs(math.expm1(-one.error)) for one in residuals() if one.kind == kind]
        assert float(np.median(errors)) < bound, kind


def test_leaving_a_source_out_fits_the_constants_again() -> None:
    assert values_without("source", "not in the table") == pytest.approx(values_without("source", "neither"))
    assert values_without("source", "dgxc") != pytest.approx(shipped(), rel=1e-3)


def test_an_interval_names_the_runs_it_comes_from() -> None:
    h100 = published_device(load_cluster("8xh100").device.name)
    assert h100 == "H100"
    known = interval(h100, "dense")
    assert "dense models in 16 bits on H100" in known.basis
    assert known.low < 1 < known.high
    assert published_device("my own chip") is None
    for device in (None, "H20", "not in the zoo"):
        unknown = interval(device, "dense")
        assert "left out" in unknown.basis
        assert unknown.low < 1 < unknown.high


def test_a_larger_gain_is_surer() -> None:
    assert chance(1.0).probability == 0.5
    assert chance(0.98).probability < chance(0.8).probability
    assert chance(1.25) == pytest.approx(chance(0.8), abs=0.02)
    assert chance(0.5).probability > 0.9
    assert all(0.0 < chance(math.exp(-gap)).probability <= 1.0 for gap in (1e-6, 0.01, 0.1, 3.0))


def test_probabilities_are_calibrated_on_models_that_they_do_not_know() -> None:
    """The curve of four fifths of the models, on the pairs of the others."""
    models = sorted({pair.model for pair in pairs()})
    part = dict(zip(models, np.random.default_rng(0).permutation(len(models)) % 5, strict=True))
    rows = []
    for fold in range(5):
        curve = sign_curve([pair for pair in pairs() if part[pair.model] != fold])
        rows += [
            (curve.at(pair.predicted).probability, pair.predicted * pair.published > 0, pair.weight)
            for pair in pairs()
            if part[pair.model] == fold
        ]
    said, right, weight = np.array(rows).T
    bins = np.digitize(said, [0.6, 0.7, 0.8, 0.9, 0.95])
    missed = sum(abs(weight[bins == each] @ (said - right)[bins == each]) for each in range(6)) / weight.sum()
    assert missed < 0.05


def test_trainers_of_the_zoo_differ_in_what_they_fuse() -> None:
    assert load_trainer("torchtitan").elementwise > load_trainer("megatron").elementwise > 1
    assert load_trainer("megatron").cross_entropy > load_trainer("torchtitan").cross_entropy
