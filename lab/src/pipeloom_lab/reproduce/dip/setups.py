"""The evaluation's models, clusters and sampled data, and how numbers are written."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pipeloom.compare.chosen_layout import choose_layout
from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster, draw_iteration, put_on_cluster
from pipeloom.layout.choose import FINAL, LayoutEvaluation
from pipeloom.search import Budget
from pipeloom.spec import Sample
from pipeloom.spec.parallelism import Degrees
from pipeloom_lab.solvers import compile_methods

TREE_SEARCHES = ("mcts", "mcts priority", "mcts uniform")
"""DIP's and PipeWeaver's as published; and DIP's, which starts from the best uniform setting."""
TYPICAL_SEEDS = (1000, 1001)
"""Of the iterations that layouts are chosen on; none of them is timed."""


@dataclass(frozen=True, slots=True)
class PaperSetup:
    """One row of the paper's Tables 3 and 6; microbatches are those of one pipeline replica."""

    model: str
    cluster: str
    tensor: int
    pipeline: int
    data: int = 1
    num_microbatches: int = 64
    """DIP §2.3 counts with 64; the larger tables do not say, and 64 is assumed."""

    @property
    def setting(self) -> ModelOnCluster:
        """The model on its cluster; made once, so that all parts share what was emulated."""
        return _case(self)

    @property
    def typical(self) -> tuple[Microbatches, ...]:
        """Iterations that layouts are chosen on."""
        return _typical(self)

    @property
    def layouts(self) -> tuple[LayoutEvaluation, ...]:
        """Layouts that were tried on the typical iterations, fastest first; on fewer where pipelines are large."""
        return _layouts(self)

    def groups(self, seed: int, number: int) -> Microbatches:
        """Microbatches of one timed iteration."""
        return draw_iteration(self.setting, self.num_microbatches, 10_000 * (1 + seed) + number)


SETUPS = {
    "VLM-S": PaperSetup("vlm-s", "dip-h800-64", 4, 4),
    "VLM-M": PaperSetup("vlm-m", "dip-h800-64", 8, 4),
    "VLM-L": PaperSetup("vlm-l", "dip-h800-64", 8, 8),
    "T2V-S": PaperSetup("t2v-s", "dip-h800-64", 4, 4),
    "T2V-L": PaperSetup("t2v-l", "dip-h800-64", 8, 8),
}
H20 = PaperSetup("vlm-s", "dip-h20-16", 4, 4)
"""Of Table 4."""
LARGE = {
    "VLM-XL, 8192 GPUs": PaperSetup("vlm-xl", "dip-h100-8k", 8, 8, 128),
    "VLM-XL, 16384 GPUs": PaperSetup("vlm-xl", "dip-h100-16k", 8, 16, 128),
    "T2V-XL, 3072 GPUs": PaperSetup("t2v-xl", "dip-h100-3k", 8, 4, 96),
    "T2V-XL, 6144 GPUs": PaperSetup("t2v-xl", "dip-h100-6k", 8, 8, 96),
}


@functools.lru_cache(maxsize=32)
def _case(setup: PaperSetup) -> ModelOnCluster:
    compile_methods(TREE_SEARCHES)
    degrees = Degrees(tensor=setup.tensor, pipeline=setup.pipeline, data=setup.data)
    return put_on_cluster(setup.model, setup.cluster, degrees)


@functools.lru_cache(maxsize=32)
def _typical(setup: PaperSetup) -> tuple[Microbatches, ...]:
    return tuple(draw_iteration(setup.setting, setup.num_microbatches, seed) for seed in TYPICAL_SEEDS)


@functools.lru_cache(maxsize=32)
def _layouts(setup: PaperSetup) -> tuple[LayoutEvaluation, ...]:
    if setup in LARGE.values():
        return choose_layout(setup.setting, setup.typical[:1], trial=Budget(seconds=0.5, clock="cpu"), rounds=1)
    return choose_layout(setup.setting, setup.typical, final=FINAL)


def images_of(groups: Microbatches) -> float:
    """Return the mean number of images of a microbatch."""
    return sum(len(s.image_tokens) for group in groups for s in group) / len(groups)


def image_bounds(i: int) -> tuple[int, int]:
    """Return the least and most images of a microbatch in iteration ``i`` of 20 (DIP §7.2)."""
    if i < 5:
        return round(16 * i / 4), 32
    share = (19 - i) / 14
    return round(16 * share), round(32 * share)


def bounded_microbatches(count: int, low: int, high: int, seed: int) -> Microbatches:
    """Draw microbatches of 8192 tokens with ``low`` to ``high`` images each, and text for the rest."""
    generator = np.random.default_rng(seed)
    groups = []
    for m in range(count):
        images = int(generator.integers(low, high + 1))
        documents = max(1, min(8, images))
        shares = [images // documents + (k < images % documents) for k in range(documents)]
        text = 8192 - 169 * images
        cuts = [text // documents + (k < text % documents) for k in range(documents)]
        groups.append([Sample(f"{m}.{k}", cuts[k], (169,) * n, (2704,) * n) for k, n in enumerate(shares)])
    return groups


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean."""
    return statistics.fmean(values)


def gain(before: float, after: float) -> str:
    """How much faster ``after`` is than ``before``, as the papers count: the ratio of times less one."""
    return f"{(before / after - 1) * 100:+.1f} %"


def seconds_text(value: float | None) -> str:
    """Seconds of an iteration, or that it does not fit."""
    return "out of memory" if value is None else f"{value:.2f}"


def device(*setups: PaperSetup) -> tuple[str, ...]:
    """Device tables that the times rest on."""
    return tuple(dict.fromkeys(device_text(s.setting) for s in setups))


def device_text(setting: ModelOnCluster) -> str:
    """The device of a case, whether its table is of a data sheet or calibrated, and its error."""
    return setting.cluster.device.label
