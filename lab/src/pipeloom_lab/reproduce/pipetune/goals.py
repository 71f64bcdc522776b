"""What we set out to reach in PipeTune's evaluation; the picture that its page opens with."""

from __future__ import annotations

from collections.abc import Mapping

from pipeloom.report.figures import Axis, bar_figure
from pipeloom_lab.reproduce.claims import Claim
from pipeloom_lab.reproduce.part import Figure
from pipeloom_lab.reproduce.pipetune.claims import MIXES, MODELS, in_regime
from pipeloom_lab.reproduce.pipetune.regime import PAPER
from pipeloom_lab.reproduce.record import Record

GOALS: tuple[Claim, ...] = (
    Claim(
        "original-joined",
        "Joined planner, least of 3B, 7B, 13B: saves against Original",
        "",
        f"{', '.join(map(str, PAPER.values()))} %",
        tuple(in_regime("ours", mix, models=MODELS, how="least") for mix in MIXES),
        "at least",
        "The lower bound of its layout and of the packings judged allows {mix1}, {mix2}, {mix3} %.",
        "%",
        also={
            mix.removeprefix("Data").lower(): in_regime("the lower bound", mix, models=MODELS, how="least")
            for mix in MIXES
        },
    ),
    Claim(
        "original-own",
        "PipeTune's own form, 13B: within five points of the paper",
        "",
        f"{', '.join(f'{saved - 5:.1f}' for saved in PAPER.values())} %",
        tuple(in_regime("PipeTune", mix) for mix in MIXES),
        "at least",
        "The paper states neither the size of Original's microbatches nor whether contexts are filled up.",
        "%",
    ),
)


def opening(records: Mapping[str, Record]) -> Figure:
    """What is saved against Original on 13B.

    Raises
    ------
    LookupError
        It is not recorded.
    """
    again = "PipeTune written again"
    columns = {"Balanced": "Balanced", again: "PipeTune", "Pipeloom": "ours", "the lower bound": "the lower bound"}
    bars = {name: [in_regime(column, mix).number(records).value for mix in MIXES] for name, column in columns.items()}
    y = Axis("shorter than Original by, %")
    svg = bar_figure(MIXES, bars, y=y, points={again: list(PAPER.values())}, values=".0f")
    title = "13B in the paper's regime, each with its fastest recomputation, emulated; diamonds: the paper's PipeTune"
    return Figure("opening", title, svg)
