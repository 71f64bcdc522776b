"""Summaries of predictions, held against numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeloom.cli.app import run
from pipeloom.validation import Prediction, PublishedRun, summarize
from pipeloom.validation.confidence import quantiles
from pipeloom.validation.summary import kendall_tau, kendall_tau_of, regret
from tests.validation.test_runs import DATA


def predicted(seconds: float, published: float, **more: object) -> Prediction:
    made = PublishedRun(id="a", source="s", model="m", device="H100", gpus=8, gbs=8, seq_len=1, iteration_s=published)
    made = PublishedRun(**{**made.__dict__, **more})
    return Prediction(made, seconds, seconds * 0.9, seconds * 1.1)


def test_errors_and_coverage() -> None:
    (errors, *_) = summarize([predicted(1.0, 1.0), predicted(1.2, 1.0), predicted(0.5, 1.0)]).errors
    assert errors.num_runs == 3
    assert errors.median == pytest.approx(0.0)
    assert errors.absolute == pytest.approx(0.2)
    assert errors.covered == pytest.approx(1 / 3)
    assert errors.half_width == pytest.approx(0.1)


def test_tau_by_iteration_time_orders_batches_of_different_sizes() -> None:
    small, large = predicted(1.0, 1.0, gbs=8).run, predicted(1.0, 1.9, gbs=16).run
    pair = [(small, 1.0), (large, 2.1)]
    assert kendall_tau_of(pair, per_token=False) == 1.0
    assert kendall_tau_of(pair) == -1.0


def test_tau_counts_pairs_of_one_model_and_device() -> None:
    good = [predicted(1.0, 1.0), predicted(2.0, 2.5)]
    assert kendall_tau(good) == 1.0
    assert kendall_tau([*good, predicted(3.0, 0.5)]) == pytest.approx(-1 / 3)
    assert kendall_tau([*good, predicted(3.0, 0.5, model="other")]) == 1.0


def test_regret_is_that_of_the_predicted_best() -> None:
    found = regret([predicted(1.0, 1.2), predicted(2.0, 1.0), predicted(9.0, 9.0, gbs=4)])
    assert found is not None
    assert found.groups == 1
    assert found.median == pytest.approx(0.2)


def test_an_interval_covers_four_fifths_and_weighs_sources_alike() -> None:
    pool = [(f"s{i}", i / 100) for i in range(101)]
    assert quantiles(pool) == pytest.approx((0.1, 0.9), abs=0.01)
    crowd = [("crowd", 5.0) for _ in range(1000)]
    assert quantiles([*pool, *crowd])[1] == pytest.approx(0.91, abs=0.02)


def test_the_command_predicts_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, *rows = DATA.read_text().splitlines()
    some = [row for row in rows if row.startswith(("dgxc-016,", "megatron-golden-596,", "zero-bubble-018,"))]
    assert len(some) == 3
    file = tmp_path / "mine.csv"
    file.write_text("\n".join([header, *some]) + "\n")
    assert run(["validate", str(file), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    found = {each["id"]: each for each in document["runs"]}
    assert set(found["dgxc-016"]) == {
        *("id", "predicted_s", "predicted_low_s", "predicted_high_s", "predicted_peak_bytes", "fitted")
    }
    assert found["megatron-golden-596"] == {"id": "megatron-golden-596", "reason": "precision fp32"}
    assert document["summary"]["reasons"] == {"precision": 1}
    assert document["summary"]["expressed"] == 2
    assert found["dgxc-016"]["fitted"]
    assert run(["validate", str(file), "--leave-out", "source", "--json"]) == 0
    without = {each["id"]: each for each in json.loads(capsys.readouterr().out)["runs"]}
    assert not without["dgxc-016"]["fitted"]
    assert without["dgxc-016"]["predicted_s"] != found["dgxc-016"]["predicted_s"]
    assert run(["validate", str(file), "--leave-out", "source"]) == 0
    text = capsys.readouterr().out
    assert "2 of 3 runs can be expressed" in text
    assert "dgxc-016" in text
