"""AdaPtis's evaluation: its parts, in the order of the paper."""

from pipeloom_lab.reproduce.adaptis.characterize import figure_1, figure_3, figure_4
from pipeloom_lab.reproduce.adaptis.depths import figure_8_depths
from pipeloom_lab.reproduce.adaptis.execution import figure_11, figure_12
from pipeloom_lab.reproduce.adaptis.generation import figure_13, figure_13_programs
from pipeloom_lab.reproduce.adaptis.scaling import figure_14, figure_15
from pipeloom_lab.reproduce.adaptis.throughput import figure_8, figure_9, figure_10
from pipeloom_lab.reproduce.part import read_parts

PARTS = read_parts(
    "adaptis",
    {
        "figure-1": figure_1,
        "figure-3": figure_3,
        "figure-4": figure_4,
        "figure-8": figure_8,
        "figure-8-depths": figure_8_depths,
        "figure-9": figure_9,
        "figure-10": figure_10,
        "figure-11": figure_11,
        "figure-12": figure_12,
        "figure-13": figure_13,
        "figure-13-programs": figure_13_programs,
        "figure-14": figure_14,
        "figure-15": figure_15,
    },
)
