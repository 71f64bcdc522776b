"""What we set out to reach in AdaPtis' evaluation; the picture that its page opens with."""

from __future__ import annotations

from collections.abc import Mapping

from pipeloom.report.figures import Axis, Mark, bar_figure
from pipeloom_lab.reproduce.adaptis.claims import PIPELINES, over_mist
from pipeloom_lab.reproduce.claims import Claim
from pipeloom_lab.reproduce.part import Figure
from pipeloom_lab.reproduce.record import Record

GOALS: tuple[Claim, ...] = (
    Claim(
        "mist",
        "P = 4, 8 and 16: throughput over Mist, average",
        "",
        "1.25, 1.25, 1.25 times",
        tuple(over_mist("over Mist, average", pipeline) for pipeline in PIPELINES),
        "at least",
        "The mean of two and of four microbatches a rank.",
        "times",
        speedup=True,
    ),
    Claim(
        "generator",
        "P = 4, 8 and 16: throughput over AdaPtis, average",
        "",
        "1.03, 1.03, 1.03 times",
        tuple(over_mist("over AdaPtis, average", pipeline) for pipeline in PIPELINES),
        "at least",
        "The bound of all placements allows {P4}, {P8} and {P16} times that generator's throughput.",
        "times",
        {f"P{pipeline}": over_mist("AdaPtis over the lower bound", pipeline) for pipeline in PIPELINES},
        speedup=True,
    ),
)


def opening(records: Mapping[str, Record]) -> Figure:
    """Throughput over Mist.

    Raises
    ------
    LookupError
        It is not recorded.
    """
    columns = {
        "Pipeloom over Mist": "over Mist, average",
        "AdaPtis' generator, written again, over Mist": "AdaPtis over Mist, average",
    }
    bars = {name: [over_mist(column, p).number(records).value for p in PIPELINES] for name, column in columns.items()}
    ranks = [f"{pipeline} ranks" for pipeline in PIPELINES]
    marks = [Mark(1.20, "the paper, over Mist")]
    svg = bar_figure(ranks, bars, y=Axis("throughput, times"), marks=marks, values=".2f")
    title = "Throughput over Mist by the length of the pipeline, emulated (Fig. 8 below)"
    return Figure("opening", title, svg)
