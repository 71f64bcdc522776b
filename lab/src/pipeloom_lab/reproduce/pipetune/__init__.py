"""PipeTune's evaluation: its parts, in the order of the paper."""

from collections.abc import Callable

from pipeloom_lab.reproduce.part import Options, Outcome, Part, Setting, TimeKind
from pipeloom_lab.reproduce.pipetune.analysis import figure_5, figure_8, figure_10, packing
from pipeloom_lab.reproduce.pipetune.beyond import replicas, trained
from pipeloom_lab.reproduce.pipetune.execution import figure_11
from pipeloom_lab.reproduce.pipetune.performance import figure_2, figure_6, figure_7, table_2
from pipeloom_lab.reproduce.pipetune.regime import own_regime
from pipeloom_lab.reproduce.pipetune.sensitivity import sensitivity
from pipeloom_lab.reproduce.pipetune.training import figure_9

_DRAWN: tuple[Setting, ...] = ("seeds", "iterations")

_ALONE = ("figure-8", "figure-9", "figure-11")
"""Tuning is timed, ranks train, and ranks sleep."""

_KINDS: dict[str, TimeKind] = {"figure-8": "processor", "figure-9": "measured"}


def _part(
    name: str, title: str, source: str, run: Callable[[Options], Outcome], uses: tuple[Setting, ...] = _DRAWN
) -> Part:
    kind = _KINDS.get(name, "emulated")
    return Part(name, title, source, kind, run, uses, alone=name in _ALONE)


_ALL: tuple[Setting, ...] = (*_DRAWN, "search")
PARTS: tuple[Part, ...] = (
    _part("figure-2", "One batch, one technique after the other", "`pipetune.txt` Fig. 2", figure_2),
    _part("packing", "Balance", "`pipetune.txt` section 3.1, A.3", packing),
    _part("figure-5", "Sequence lengths", "`pipetune.txt` Fig. 5", figure_5, ("seeds",)),
    _part("table-2", "What each technique brings", "`pipetune.txt` Table 2", table_2, _ALL),
    _part("figure-6", "Three sizes, two clusters, three mixtures", "`pipetune.txt` Fig. 6", figure_6),
    _part("sensitivity", "What the reductions rest on", "`pipetune.txt` Table 2, under other assumptions", sensitivity),
    _part("regime", "The paper's regime", "`pipetune.txt` section 5", own_regime, _ALL),
    _part("figure-7", "Microbatch sizes", "`pipetune.txt` Fig. 7", figure_7, _ALL),
    _part("figure-8", "Tuning time", "`pipetune.txt` Fig. 8", figure_8),
    _part("figure-9", "Losses, tuned and untuned", "`pipetune.txt` Fig. 9, A.2", figure_9),
    _part("figure-10", "Time of one layer by length", "`pipetune.txt` Fig. 10", figure_10, ()),
    _part("figure-11", "Estimated, emulated and executed times", "`pipetune.txt` Fig. 11", figure_11),
    _part("trained", "A trained encoder", "beyond `pipetune.txt` section 3.3", trained),
    _part("replicas", "Data-parallel replicas", "beyond `pipetune.txt` section 6", replicas, ("seeds",)),
)
