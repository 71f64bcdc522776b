"""DIP's evaluation: its parts, in the order of the paper."""

from pipeloom_lab.reproduce.dip.ablation import figure_9, figure_10, section_3_1, table_5
from pipeloom_lab.reproduce.dip.characterise import figure_4, section_2_2, table_1
from pipeloom_lab.reproduce.dip.end_to_end import (
    figure_8a,
    figure_8b,
    published_search,
    table_4,
    tried_layouts,
    unsearched,
)
from pipeloom_lab.reproduce.dip.images import over_images
from pipeloom_lab.reproduce.dip.large import large
from pipeloom_lab.reproduce.dip.literal import programs, to_the_letter
from pipeloom_lab.reproduce.dip.planner_parts import dealing, figure_11, figure_12, figure_13, ordering_consistency
from pipeloom_lab.reproduce.dip.planning import planning_time
from pipeloom_lab.reproduce.part import Options, Part, Setting

FULL = Options(tuple(range(10)), 100, 1.0, 3 * 3600.0, True)
"""As in the paper: means over 100 iterations (Fig. 8a) and ten runs (section 7.1), ten seconds for its search
(Fig. 11), solvers cut after three hours (Fig. 12)."""

FIVE = "five models"
"""What parts share that time the five models under the layouts that were chosen for them."""
ONE: tuple[Setting, ...] = ("seeds", "search")
"""Options of parts that time one iteration for each seed, or a fixed number."""
PARTS: tuple[Part, ...] = (
    Part("table-1", "Static and dynamic imbalance", "`dip.txt` Table 1", "emulated", table_1, uses=("seeds",)),
    Part(
        "images",
        "Images a microbatch",
        "`dip.txt` Table 1, Fig. 8a, Fig. 9, over an axis that it does not state",
        "emulated",
        over_images,
        uses=ONE,
    ),
    Part("section-2-2", "The best cut is uneven", "`dip.txt` section 2.2", "emulated", section_2_2, uses=()),
    Part("figure-4", "How data differ", "`dip.txt` Fig. 4", "emulated", figure_4, uses=("seeds",)),
    Part(
        "section-3-1",
        "Separated partitioning",
        "`dip.txt` section 3.1",
        "emulated",
        section_3_1,
        uses=("seeds", "iterations"),
    ),
    Part(
        "layouts",
        "Layouts, and what each would have cost",
        "`dip.txt` section 4",
        "emulated",
        tried_layouts,
        uses=(),
        shares=FIVE,
    ),
    Part("table-4", "FSDP, Megatron-LM and DIP on 16 H20", "`dip.txt` Table 4", "emulated", table_4, uses=ONE),
    Part(
        "figure-8a",
        "Five models on mixed data",
        "`dip.txt` Fig. 8a",
        "emulated",
        figure_8a,
        most_iterations=3,
        shares=FIVE,
    ),
    Part("unsearched", "What searching brings", "nothing in the papers", "emulated", unsearched, uses=ONE, shares=FIVE),
    Part("figure-8b", "Changing data", "`dip.txt` Fig. 8b", "emulated", figure_8b, uses=("search",), shares=FIVE),
    Part("table-5", "What each technique brings", "`dip.txt` Table 5", "emulated", table_5, uses=ONE, shares=FIVE),
    Part("figure-9", "Sub-microbatch sizes", "`dip.txt` Fig. 9", "emulated", figure_9),
    Part("figure-10", "Memory of the first rank", "`dip.txt` Fig. 10", "emulated", figure_10, uses=ONE, shares=FIVE),
    Part("published", "DIP's searches", "`dip.txt` section 5.1", "emulated", published_search, uses=ONE, shares=FIVE),
    Part(
        "program",
        "The program for one rank's strategies",
        "`dip.txt` section 5.3",
        "processor",
        programs,
        uses=("seeds",),
        alone=True,
    ),
    Part(
        "literal",
        "DIP to the letter, and where its steps show",
        "`dip.txt` Table 5, Fig. 11, section 5",
        "emulated",
        to_the_letter,
        uses=ONE,
        searched="a batch, and each search of DIP twice as much on every core",
    ),
    Part("planning", "Planning time", "`dip.txt` section 7.4", "processor", planning_time, uses=ONE, alone=True),
    Part("figure-11", "Search progress", "`dip.txt` Fig. 11", "emulated", figure_11, uses=ONE),
    Part(
        "figure-12",
        "Search time against exact solvers",
        "`dip.txt` Fig. 12",
        "processor",
        figure_12,
        uses=("seeds", "search", "solver"),
        alone=True,
    ),
    Part("figure-13", "Degrees of parallelism", "`dip.txt` Fig. 13", "emulated", figure_13, uses=ONE),
    Part("dealing", "Dealing microbatches to replicas", "nothing in the papers", "emulated", dealing, uses=ONE),
    Part(
        "consistency",
        "Orders of optimal schedules",
        "`pipeweaver.txt` section 5",
        "emulated",
        ordering_consistency,
        uses=("seeds",),
        alone=True,
    ),
    Part("figure-14", "Thousands of GPUs", "`dip.txt` Fig. 14, Table 6", "emulated", large, uses=ONE),
)
