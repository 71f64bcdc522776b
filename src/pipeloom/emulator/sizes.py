"""Choose the smallest sub-microbatch that keeps most of the best efficiency."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from pipeloom.emulator.build import Placement, module_templates
from pipeloom.emulator.stage import Stage, runs_of
from pipeloom.errors import InputError
from pipeloom.spec import Sample, Workload
from pipeloom.spec.architecture import Architecture

ENOUGH = 0.95
"""Share of the best efficiency that a sub-microbatch must reach (DIP section 4)."""


def shares_of_best(num_tokens: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the efficiency of every size as a share of the best.

    Efficiency is tokens per second, so that unequal instances compare fairly.
    """
    rate = [n / s if s > 0 else 0.0 for n, s in zip(num_tokens, seconds, strict=True)]
    best = max(rate) or 1.0
    return tuple(r / best for r in rate)


def smallest_sufficient(efficiency: Sequence[float], share: float = ENOUGH) -> int:
    """Return the index of the first size with enough efficiency.

    Raises
    ------
    InputError
        If the share is not between 0 and 1.
    """
    if not 0 < share <= 1:
        raise InputError("share", f"{share} is not above 0 and at most 1")
    return next(i for i, e in enumerate(efficiency) if e >= share)


def image_sizes(
    architecture: Architecture, placement: Placement, microbatches: Sequence[Sequence[Sample]]
) -> Mapping[str, int]:
    """Return the images of a sub-microbatch for every module that reads images, by DIP's rule (section 4).

    Sizes up to the largest microbatch are timed on images of median length.
    """
    out = {}
    for module in architecture.modules:
        counts = [[n for s in samples for n in module.lengths(s) if n > 0] for samples in microbatches]
        if module.reads != "images" or not any(counts):
            continue
        median = int(statistics.median(n for lengths in counts for n in lengths))
        stage = Stage(runs_of(list(module_templates(architecture, module, placement))))
        works = [Workload((median,) * n) for n in range(1, max(map(len, counts)) + 1)]
        seconds = [float(sum(stage.cost(work, ("F", "B")).duration_ps.values())) for work in works]
        efficiency = shares_of_best([work.num_tokens for work in works], seconds)
        out[module.name] = 1 + smallest_sufficient(efficiency)
    return out
