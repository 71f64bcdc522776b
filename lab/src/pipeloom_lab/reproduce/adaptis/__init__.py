"""AdaPtis's evaluation: its parts, in the order of the paper."""

from collections.abc import Callable

from pipeloom_lab.reproduce.adaptis.characterise import figure_1, figure_3, figure_4
from pipeloom_lab.reproduce.adaptis.depths import SEARCH, figure_8_depths
from pipeloom_lab.reproduce.adaptis.execution import figure_11, figure_12
from pipeloom_lab.reproduce.adaptis.generation import figure_13
from pipeloom_lab.reproduce.adaptis.programs import figure_13_programs
from pipeloom_lab.reproduce.adaptis.scaling import figure_14, figure_15
from pipeloom_lab.reproduce.adaptis.setups import MOST_SEARCH
from pipeloom_lab.reproduce.adaptis.throughput import figure_8, figure_9, figure_10
from pipeloom_lab.reproduce.part import Options, Outcome, Part


def _searched(
    number: int, title: str, run: Callable[[Options], Outcome], shares: str = "", alone: bool = False
) -> Part:
    """A part whose placements are made once, for no batch in particular."""
    return Part(
        f"figure-{number}",
        title,
        f"`adaptis.txt` Fig. {number}",
        "emulated",
        run,
        ("seeds", "search"),
        "a placement",
        MOST_SEARCH,
        shares,
        alone,
    )


PARTS: tuple[Part, ...] = (
    _searched(1, "Bubbles of what is there", figure_1),
    _searched(3, "Three steps of tuning", figure_3),
    Part("figure-4", "Size of the search space", "`adaptis.txt` Fig. 4", "emulated", figure_4, ()),
    _searched(8, "Throughput of nine models", figure_8),
    Part(
        "figure-8-depths",
        "Throughput by pipeline degree and microbatches",
        "`adaptis.txt` Fig. 8, section 5.1",
        "emulated",
        figure_8_depths,
        ("seeds", "search"),
        "a placement",
        SEARCH,
    ),
    _searched(9, "Sequence lengths", figure_9, "64 microbatches"),
    _searched(10, "Ablation of the three phases", figure_10),
    _searched(11, "Traces", figure_11, "64 microbatches"),
    _searched(12, "Prediction against execution", figure_12, alone=True),
    Part(
        "figure-13", "Generation time", "`adaptis.txt` Fig. 13", "processor", figure_13, ("seeds", "solver"), alone=True
    ),
    Part(
        "figure-13-programs",
        "Integer programs",
        "`adaptis.txt` Fig. 13",
        "processor",
        figure_13_programs,
        ("seeds", "solver"),
        alone=True,
    ),
    _searched(14, "Strong scaling", figure_14),
    _searched(15, "Weak scaling", figure_15),
)
