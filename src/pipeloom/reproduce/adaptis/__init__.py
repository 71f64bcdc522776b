"""AdaPtis's evaluation: its parts, in the order of the paper."""

from pipeloom.reproduce.adaptis.characterise import figure_1, figure_3, figure_4
from pipeloom.reproduce.adaptis.execution import figure_11, figure_12
from pipeloom.reproduce.adaptis.generation import figure_13
from pipeloom.reproduce.adaptis.scaling import figure_14, figure_15
from pipeloom.reproduce.adaptis.throughput import figure_8, figure_9, figure_10
from pipeloom.reproduce.part import Part

PARTS: tuple[Part, ...] = (
    Part("figure-1", "Bubbles of what is there", "`adaptis.txt` Fig. 1", "emulated", figure_1),
    Part("figure-3", "Three steps of tuning", "`adaptis.txt` Fig. 3", "emulated", figure_3),
    Part("figure-4", "Size of the search space", "`adaptis.txt` Fig. 4", "emulated", figure_4),
    Part("figure-8", "Throughput of nine models", "`adaptis.txt` Fig. 8", "emulated", figure_8),
    Part("figure-9", "Sequence lengths", "`adaptis.txt` Fig. 9", "emulated", figure_9),
    Part("figure-10", "Ablation of the three phases", "`adaptis.txt` Fig. 10", "emulated", figure_10),
    Part("figure-11", "Traces", "`adaptis.txt` Fig. 11", "emulated", figure_11),
    Part("figure-12", "Prediction against execution", "`adaptis.txt` Fig. 12", "emulated", figure_12),
    Part("figure-13", "Generation time", "`adaptis.txt` Fig. 13", "processor", figure_13),
    Part("figure-14", "Strong scaling", "`adaptis.txt` Fig. 14", "emulated", figure_14),
    Part("figure-15", "Weak scaling", "`adaptis.txt` Fig. 15", "emulated", figure_15),
)
