"""The picture that a paper's page opens with, drawn from the records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pipeloom.lab.reproduce.claims import Found
from pipeloom.lab.reproduce.goals import MIXES, MODELS, PIPELINES, SIZES, depths, gain, saved
from pipeloom.lab.reproduce.record import Record
from pipeloom.report.figures import Axis, Mark, bar_figure

Records = Mapping[str, Record]


class Opening(NamedTuple):
    """A picture, and what it shows."""

    title: str
    svg: str


def _bars(records: Records, series: Mapping[str, Sequence[Found]]) -> dict[str, list[float | None]]:
    return {name: [found.number(records).value for found in each] for name, each in series.items()}


def _dip(records: Records) -> Opening:
    columns = {
        "the best of nine baselines": "over the best baseline",
        "DIP written again, best of its forms": "over DIP, best of its forms",
        "Megatron-LM interleaved by parameters": "over Megatron-LM",
    }
    series = {name: [gain(column, model) for model in MODELS] for name, column in columns.items()}
    svg = bar_figure(MODELS, _bars(records, series), y=Axis("ours is faster by, %"), values=".0f")
    return Opening("What Pipeloom is faster by: five models on up to 64 GPUs, emulated (Fig. 8a below)", svg)


def _pipetune(records: Records) -> Opening:
    names = {"Balanced": "Balanced", "PipeTune written again": "PipeTune", "Pipeloom": "ours"}
    names["the lower bound"] = "the lower bound"
    series = {name: [saved(column, mix, SIZES[2]) for mix in MIXES] for name, column in names.items()}
    svg = bar_figure(
        MIXES,
        _bars(records, series),
        y=Axis("shorter than Original by, %"),
        points={"PipeTune written again": [40.7, 28.9, 16.1]},
        values=".0f",
    )
    return Opening(
        "13B in the paper's regime, each with its fastest recomputation, emulated; diamonds: the paper's PipeTune", svg
    )


def _adaptis(records: Records) -> Opening:
    names = {
        "Pipeloom over Mist": "over Mist, average",
        "AdaPtis' generator, written again, over Mist": "AdaPtis over Mist, average",
    }
    series = {name: list(depths(column)) for name, column in names.items()}
    ranks = [f"{pipeline} ranks" for pipeline in PIPELINES]
    marks = [Mark(1.20, "the paper, over Mist")]
    svg = bar_figure(ranks, _bars(records, series), y=Axis("throughput, times"), marks=marks, values=".2f")
    return Opening("Throughput over Mist by the length of the pipeline, emulated (Fig. 8 below)", svg)


_OPENINGS: dict[str, Callable[[Records], Opening]] = {"dip": _dip, "pipetune": _pipetune, "adaptis": _adaptis}


def opening(paper: str, records: Records) -> Opening | None:
    """The picture of a paper; None: what it shows is not recorded."""
    try:
        return _OPENINGS[paper](records)
    except LookupError:
        return None
