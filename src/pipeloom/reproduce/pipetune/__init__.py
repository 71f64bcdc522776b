"""PipeTune's evaluation: its parts, in the order of the paper."""

from pipeloom.reproduce.part import Part
from pipeloom.reproduce.pipetune.analysis import figure_5, figure_8, figure_10, figure_11, packing
from pipeloom.reproduce.pipetune.beyond import replicas, trained
from pipeloom.reproduce.pipetune.performance import figure_2, figure_6, figure_7, table_2
from pipeloom.reproduce.pipetune.sensitivity import sensitivity

PREFACE = """\
Reductions against an untuned run depend on how large its microbatches are, which memory decides and the paper does not
say. Here ranks recompute norms and activation functions, layers are divided as TorchTitan divides them, and
microbatches are as large as then fit, at most 8 contexts.
[What the reductions rest on](#what-the-reductions-rest-on) shows them for smaller and larger ones, and for which of
them they are at least the paper's.
"""
"""Stands at the head of the page."""

PARTS: tuple[Part, ...] = (
    Part(
        "figure-2", "One batch, one technique after the other", "`pipetune.txt` Fig. 2", "emulated", figure_2
    ),
    Part("packing", "Balance", "`pipetune.txt` section 3.1, A.3", "emulated", packing),
    Part("figure-5", "Sequence lengths", "`pipetune.txt` Fig. 5", "emulated", figure_5),
    Part("table-2", "What each technique brings", "`pipetune.txt` Table 2", "emulated", table_2),
    Part(
        "figure-6", "Three sizes, two clusters, three mixtures", "`pipetune.txt` Fig. 6", "emulated", figure_6
    ),
    Part(
        "sensitivity",
        "What the reductions rest on",
        "`pipetune.txt` Table 2, under other assumptions",
        "emulated",
        sensitivity,
    ),
    Part("figure-7", "Microbatch sizes", "`pipetune.txt` Fig. 7", "emulated", figure_7),
    Part("figure-8", "Tuning time", "`pipetune.txt` Fig. 8", "processor", figure_8),
    Part("figure-10", "Time of one layer by length", "`pipetune.txt` Fig. 10", "emulated", figure_10),
    Part("figure-11", "Estimated and emulated times", "`pipetune.txt` Fig. 11", "emulated", figure_11),
    Part("trained", "A trained encoder", "beyond `pipetune.txt` section 3.3", "emulated", trained),
    Part("replicas", "Data-parallel replicas", "beyond `pipetune.txt` section 6", "emulated", replicas),
)
