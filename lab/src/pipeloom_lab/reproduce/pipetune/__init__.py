"""PipeTune's evaluation: its parts, in the order of the paper."""

from pipeloom_lab.reproduce.part import read_parts
from pipeloom_lab.reproduce.pipetune.analysis import figure_5, figure_8, figure_10, packing
from pipeloom_lab.reproduce.pipetune.beyond import replicas, trained
from pipeloom_lab.reproduce.pipetune.execution import figure_11
from pipeloom_lab.reproduce.pipetune.performance import figure_2, figure_6, figure_7, sensitivity, table_2
from pipeloom_lab.reproduce.pipetune.regime import own_regime
from pipeloom_lab.reproduce.pipetune.training import figure_9

PARTS = read_parts(
    "pipetune",
    {
        "figure-2": figure_2,
        "packing": packing,
        "figure-5": figure_5,
        "table-2": table_2,
        "figure-6": figure_6,
        "sensitivity": sensitivity,
        "regime": own_regime,
        "figure-7": figure_7,
        "figure-8": figure_8,
        "figure-9": figure_9,
        "figure-10": figure_10,
        "figure-11": figure_11,
        "trained": trained,
        "replicas": replicas,
    },
)
