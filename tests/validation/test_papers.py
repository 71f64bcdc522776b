"""Predictions of the papers' own figures: what a range is made of, and what its error means."""

from __future__ import annotations

import json

import msgspec
import pytest

import pipeloom.validation
from pipeloom.cli.app import run
from pipeloom.spec.catalog import load_architecture, load_cluster, load_trainer
from pipeloom.spec.datasets import load_mixture
from pipeloom.spec.parallelism import Degrees
from pipeloom.validation import PaperFigure, PaperPrediction, paper_figures, predict_figure

FIGURES = {figure.id: figure for figure in paper_figures()}
LM = FIGURES["dip-table-1-lm"]


def changed(figure: PaperFigure, **changes: object) -> PaperFigure:
    return msgspec.structs.replace(figure, **changes)


def test_every_figure_names_what_exists_and_says_what_is_unstated() -> None:
    assert len(FIGURES) == len(paper_figures())
    assert {figure.paper for figure in paper_figures()} == {"DIP", "PipeTune"}
    for figure in paper_figures():
        load_architecture(figure.model)
        load_trainer(figure.trainer)
        assert figure.degrees.num_devices <= load_cluster(figure.cluster).num_devices
        for data in figure.data:
            load_mixture(data)
        assert figure.reason or figure.unstated
        assert figure.reason or bool(figure.images) != bool(figure.data), "one content, or nothing is predicted"


def test_the_error_is_that_of_the_nearest_end() -> None:
    assert PaperPrediction(LM, 3.0, 5.0).error == 0
    assert PaperPrediction(LM, 2 * LM.published, 3 * LM.published).error == pytest.approx(1.0)
    assert PaperPrediction(LM, 0.1, LM.published / 2).error == pytest.approx(-0.5)
    assert PaperPrediction(LM, reason="no room").error is None
    row = PaperPrediction(LM, reason="no room").row
    assert row["reason"] == "no room"
    assert "predicted_low" not in row


def test_what_is_unstated_widens_the_range() -> None:
    both = predict_figure(LM)
    fastest, everything = (predict_figure(changed(LM, recompute=(name,))) for name in ("fastest", "all"))
    assert fastest.low == fastest.high == both.low
    assert everything.low == everything.high == both.high
    assert both.high > 1.15 * both.low  # Recomputation repeats the forward, a third of the operations.


def test_operations_decide_the_number_of_microbatches() -> None:
    assert LM.petaflops is not None
    once, twice = (
        predict_figure(changed(LM, petaflops=times * LM.petaflops, recompute=("fastest",))) for times in (1, 2)
    )
    assert 1.85 < twice.low / once.low < 2  # Warm-up and update do not double.
    mfu = predict_figure(changed(LM, unit="MFU", recompute=("fastest",)))
    device = load_cluster(LM.cluster).device
    peak = LM.degrees.num_devices * device.flops_per_s
    assert mfu.low == pytest.approx(LM.petaflops * 1e15 / peak / once.low, rel=0.03)


def test_a_figure_that_does_not_fit_has_a_reason() -> None:
    alone = changed(LM, model="llama2-13b", degrees=Degrees(), recompute=("all",))
    found = predict_figure(alone)
    assert found.low == 0
    assert "needs" in found.reason or "fit" in found.reason
    stated = predict_figure(changed(LM, reason="not described"))
    assert stated.reason == "not described"


def test_microbatches_are_the_largest_that_fit_unless_their_size_is_searched() -> None:
    full = FIGURES["pipetune-table-2-balanced-1"]
    full = changed(full, samples=48, recompute=("all",), filled=(False,))
    largest = predict_figure(full)
    smaller = predict_figure(changed(full, contexts=1))
    assert largest.low > smaller.low, "one large microbatch leaves the ranks of a pipeline idle"
    assert predict_figure(changed(full, adaptive=True)).low <= smaller.low
    filled = predict_figure(changed(full, filled=(True,)))
    assert filled.low > largest.low


def test_a_searched_order_is_no_slower_than_a_fixed_one() -> None:
    figure = changed(FIGURES["dip-table-5-dip"], microbatches=(6,), data=("dip-vlm",))
    searched, fifo = predict_figure(figure), predict_figure(changed(figure, order="fifo"))
    assert searched.low <= fifo.low


def test_the_time_of_given_degrees_is_at_least_that_of_the_fastest() -> None:
    figure = changed(
        FIGURES["dip-figure-13-best"], model="vlm-s", degrees=Degrees(tensor=4, pipeline=2), microbatches=(4,)
    )
    found = predict_figure(changed(figure, data=("scienceqa",)))
    assert 1 <= found.low == found.high < 5


def test_the_command_prints_figures_only_beside_the_published_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    some = (LM, FIGURES["dip-table-5-partitioner"])
    monkeypatch.setattr(pipeloom.validation, "paper_figures", lambda: some)
    monkeypatch.setattr(pipeloom.validation, "published_runs", lambda: ())
    assert run(["validate", "--json"]) == 0
    lm, partitioner = json.loads(capsys.readouterr().out)["papers"]
    assert lm["id"] == LM.id
    assert lm["predicted_low"] < lm["published"] < lm["predicted_high"]
    assert lm["fitted"] is False
    assert "reason" in partitioner
    assert run(["validate"]) == 0
    text = capsys.readouterr().out
    assert "4.068 s" in text
    assert "dip-table-5-partitioner" in text
