"""DIP's evaluation: its parts, in the order of the paper."""

from pipeloom_lab.reproduce.dip.ablation import figure_9, figure_10, section_3_1, table_5
from pipeloom_lab.reproduce.dip.characterize import figure_4, section_2_2, table_1
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
from pipeloom_lab.reproduce.dip.planner_parts import assigning, figure_11, figure_12, figure_13, ordering_consistency
from pipeloom_lab.reproduce.dip.planning import planning_time
from pipeloom_lab.reproduce.part import Options, read_parts

FULL = Options(tuple(range(10)), 100, 1.0, 3 * 3600.0, True)
"""As in the paper: means over 100 iterations (Fig. 8a) and ten runs (section 7.1), ten seconds for its search
(Fig. 11), solvers cut after three hours (Fig. 12)."""
PARTS = read_parts(
    "dip",
    {
        "table-1": table_1,
        "images": over_images,
        "section-2-2": section_2_2,
        "figure-4": figure_4,
        "section-3-1": section_3_1,
        "layouts": tried_layouts,
        "table-4": table_4,
        "figure-8a": figure_8a,
        "unsearched": unsearched,
        "figure-8b": figure_8b,
        "table-5": table_5,
        "figure-9": figure_9,
        "figure-10": figure_10,
        "published": published_search,
        "program": programs,
        "literal": to_the_letter,
        "planning": planning_time,
        "figure-11": figure_11,
        "figure-12": figure_12,
        "figure-13": figure_13,
        "dealing": assigning,
        "consistency": ordering_consistency,
        "figure-14": large,
    },
)
