"""Intervals of times and probabilities of gains, on residuals that are made up, so that no fit changes them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from pipeloom.spec.catalog import load_architecture, load_cluster, load_trainer
from pipeloom.validation import confidence
from pipeloom.validation.confidence import (
    Interval,
    Pair,
    Residual,
    chance,
    interval,
    interval_for,
    model_kind,
    sign_curve,
)

H100 = load_cluster("8xH100").device
MEGATRON = load_trainer("megatron")


@pytest.fixture(autouse=True)
def _made_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Thirty dense runs on H100, whose errors are three times as large without the device, and pairs."""
    errors = [k / 150 for k in range(-15, 15)]
    runs = tuple(Residual(str(i), "one", "H100", "gpt", "dense", x, 3 * x) for i, x in enumerate(errors))
    monkeypatch.setattr(confidence, "residuals", lambda: runs)
    # The smaller the predicted difference, the more pairs differ in the other direction.
    pairs = [
        Pair(("one", "gpt"), gap, gap if k >= wrong else -gap, 1.0)
        for gap, wrong in ((0.01, 16), (0.4, 1))
        for k in range(40)
    ]
    curve = sign_curve(pairs)
    monkeypatch.setattr(confidence, "_curve", lambda: curve)
    confidence.published_device.cache_clear()
    yield
    confidence.published_device.cache_clear()


def width(one: Interval) -> float:
    return one.high - one.low


def test_an_interval_is_wider_on_a_device_without_runs() -> None:
    model = load_architecture("llama2-7b")
    known = interval_for(H100, model, MEGATRON)
    unknown = interval_for(load_cluster("8xH20").device, model, MEGATRON)
    assert "dense models in 16 bits on H100" in known.basis
    assert "none on this device" in unknown.basis
    assert width(unknown) > 2 * width(known)


def test_a_measured_table_has_the_interval_of_a_device_without_runs() -> None:
    measured = msgspec.structs.replace(H100, basis="measured")
    found = interval_for(measured, load_architecture("llama2-7b"), MEGATRON)
    assert found == interval(None, "dense")


def test_a_model_or_a_trainer_without_runs_is_named() -> None:
    multimodal = interval_for(H100, load_architecture("vlm-m"), MEGATRON)
    assert "none of hybrid or multimodal models" in multimodal.basis
    assert (
        "none by the trainer fused" in interval_for(H100, load_architecture("llama2-7b"), load_trainer("fused")).basis
    )


@pytest.mark.parametrize(("name", "kind"), [("llama2-7b", "dense"), ("vlm-m", "other"), ("t2v-s", "other")])
def test_the_kind_of_a_model(name: str, kind: str) -> None:
    assert model_kind(load_architecture(name)) == kind


def test_bounds_are_text_and_fields() -> None:
    one = Interval(0.9, 1.25, "10 runs")
    assert one.text(2.0) == "1.80 to 2.50 s"
    assert one.fields(2.0) == {"iteration_low_s": 1.8, "iteration_high_s": 2.5}
    assert one.note == "80 % interval from 10 runs"


def test_the_probability_grows_with_the_gain() -> None:
    small, large = chance(0.99), chance(1 / 1.5)
    assert small.probability == pytest.approx(0.6, abs=0.01)
    assert large.probability == pytest.approx(39 / 40)
    assert large.text == "98 %"
    between = [chance(1 - gap).probability for gap in (0.01, 0.02, 0.05, 0.1, 0.4)]
    assert between == sorted(between)
    assert chance(1.001).probability == pytest.approx(0.6)
    assert chance(1.0).text == ""
