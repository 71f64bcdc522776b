"""How far our figures can be trusted: errors of the device tables, and the probability that a gain has its sign."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

from pipeloom.validation import chance, interval, published_device
from pipeloom.validation.runs import ModelKind
from pipeloom_lab.reproduce.record import Record

Gain = Literal["", "faster", "shorter", "times", "share", "seconds"]
"""How a figure compares two emulated times: per cent by which one iteration is faster, or its time shorter; a ratio of
throughputs or times; a share of a throughput in per cent; or a time, which is compared with the next figure."""
SURE = 0.9
"""A gain whose sign is right with a lower probability is marked."""
MODELS: Mapping[ModelKind, str] = {"dense": "dense", "experts": "with experts", "other": "multimodal or hybrid"}
"""Kinds of models in words."""
_KINDS: Mapping[str, tuple[ModelKind, ...]] = {
    "dip": ("other",),
    "pipetune": ("other",),
    "adaptis": ("dense", "experts", "other"),
}
"""Kinds of the models in each paper's evaluation: multimodal; Gemma, DeepSeek and Nemotron-H."""


def sign_probability(gain: Gain, figures: Sequence[float], *, rises: bool = False) -> float | None:
    """Return the probability that all of a claim's gains have the right sign: that of the smallest gain.

    Parameters
    ----------
    gain : Gain
        How the figures compare times.
    figures : sequence of float
        The figures.
    rises : bool
        Whether the claim is that each figure is above the one before it. The sign is then that of each step.

    Returns
    -------
    float or None
        None if the figures compare no times.
    """
    if not gain or not figures:
        return None
    times = [_ratio(gain, figure) for figure in figures]
    if rises or gain == "seconds":
        times = [after / before for before, after in pairwise(times) if before > 0]
    return min((chance(ratio).probability for ratio in times), default=None)


def _ratio(gain: Gain, figure: float) -> float:
    """Return the ratio of the two times that a figure compares."""
    if gain == "faster":
        return 1 + figure / 100
    if gain == "shorter":
        return 1 / (1 - figure / 100) if figure < 100 else 0.0
    return figure / 100 if gain == "share" else figure


def sign_text(probability: float | None) -> str:
    """Return the probability in per cent, in bold if it is below `SURE`; a dash for None."""
    if probability is None:
        return "-"
    text = f"{math.floor(100 * probability)} %"  # 89.6 is below 90.
    return text if probability >= SURE else f"**{text}**"


def device_rows(records: Mapping[str, Mapping[str, Record]]) -> list[tuple[str, ...]]:
    """Return the device tables that emulated times rest on: error of runs on the device, and what has these times."""
    uses: dict[tuple[str, ModelKind], dict[str, int]] = {}
    for paper, parts in records.items():
        for record in parts.values():
            for label in record.devices:
                for kind in _KINDS[paper]:
                    count = uses.setdefault((label, kind), {})
                    count[paper] = count.get(paper, 0) + 1
    rows = list[tuple[str, ...]]()
    for (label, kind), count in sorted(uses.items()):
        name, _, made = label.partition(" (")
        found = interval(published_device(name), kind)
        made_by = ", ".join(f"{number} of {paper}" for paper, number in count.items())
        bounds = f"{100 * (found.low - 1):+.0f} to {100 * (found.high - 1):+.0f} %"
        rows.append(
            (name, MODELS[kind], made.removesuffix(")"), made_by, f"{100 * found.median:.1f} %", bounds, found.basis)
        )
    return rows
