"""Models, clusters, batches and systems of PipeTune's evaluation (section 5), on emulated hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np

from pipeloom.cost import rank_static_bytes
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.cost.encoder_dp import EncoderDpCosts
from pipeloom.layout import encoder_first
from pipeloom.packing import Policy
from pipeloom.search import Budget, solve
from pipeloom.spec import Batch, Chunk, Layout, Workload
from pipeloom.spec.datasets import cut, draw_samples
from pipeloom.spec.parallelism import Degrees
from pipeloom.timeline import Timeline, simulate
from pipeloom.tuning import TunedPipeline, TunedPlan, TuningResult, TuningSpec, tune, tuned_pipeline, tuned_plan
from pipeloom_lab.reproduce.part import Options

MIXTURES = ("datamix1", "datamix2", "datamix3")
NAMES = dict(zip(MIXTURES, ("DataMix1", "DataMix2", "DataMix3"), strict=True))
GLOBAL_BATCH = 128
RANKS = 4
MOST_CONTEXTS = 8
"""Largest microbatch that section 5.2 sets, in contexts; memory would hold more of the small models."""
RECOMPUTED = "selective"
"""What the emulator's ranks recompute: norms and activation functions. The paper says nothing; TorchTitan, on which it
builds, recomputes more by default. The part ``sensitivity`` shows what other assumptions do."""
_MOST_IMAGES = 10_000


@dataclass(frozen=True)
class PaperSetup:
    """One model on one cluster."""

    size: str
    cluster: str
    tensor: int
    context: int

    @property
    def name(self) -> str:
        """As in the paper's figures."""
        return f"{self.size.upper()} " + (f"TP{self.tensor}·PP4" if self.tensor > 1 else "PP4")


SIZES = ("3b", "7b", "13b")
ON_A = {size: PaperSetup(size, "pipetune-a", 4, 8192) for size in SIZES}
"""Cluster A: A100, tensor parallelism in each node."""
ON_B = {size: PaperSetup(size, "pipetune-b", 1, 4096) for size in SIZES}
"""Cluster B: GH200, one a node."""


@dataclass(frozen=True, eq=False)
class EmulatedSetup:
    """A setup with its costs, laid out as TorchTitan does: encoder and projector before equally many layers a rank."""

    setup: PaperSetup
    costs: EmulatedCosts
    layout: Layout
    pipeline: TunedPipeline
    capacity_bytes: int
    max_contexts: int
    """Largest microbatch that fits into memory, in contexts."""

    @property
    def token_budget(self) -> int:
        """The same in tokens."""
        return self.max_contexts * self.setup.context

    @property
    def device(self) -> str:
        """The device table that times rest on."""
        return self.costs.cluster.device.label


@cache
def emulated(
    setup: PaperSetup, even: bool = True, recomputed: str = RECOMPUTED, most_contexts: int = MOST_CONTEXTS
) -> EmulatedSetup:
    """Emulate a setup.

    Parameters
    ----------
    even : bool
        False: the backbone's layers are balanced with the encoder counted in (ours).
    recomputed : str
        Memory strategy of every layer: ``keep``, ``selective``, ``recompute:0.5``, ``recompute``.
    most_contexts : int
        Largest microbatch that is looked at.
    """
    costs = EmulatedCosts(
        f"pipetune-vlm-{setup.size}", setup.cluster, Degrees(tensor=setup.tensor, pipeline=RANKS), (recomputed,)
    )
    model = costs.model_spec
    load = mean_load(setup, costs)
    layout = encoder_first(model, RANKS, lambda module, layer: load[f"{module}/{layer.kind}"], even_layers=even)
    capacity = costs.cluster.device.usable_bytes
    contexts = max(1, max_contexts(setup, costs, layout, capacity, most_contexts))
    pipeline = tuned_pipeline(
        model,
        layout,
        costs,
        max_tokens=most_contexts * setup.context,
        max_length=setup.context,
        capacity_bytes=capacity,
    )
    return EmulatedSetup(setup, costs, layout, pipeline, capacity, contexts)


def mean_load(setup: PaperSetup, costs: EmulatedCosts, encoder_dp: frozenset[str] = frozenset()) -> dict[str, float]:
    """Seconds of one layer of each kind on a context of the second mixture's mean composition."""
    priced = EncoderDpCosts(costs, encoder_dp, setup.tensor)
    samples = [cut(s, setup.context, _MOST_IMAGES) for s in draw_samples("datamix2", 512, 0)]
    load = {}
    share = setup.context / sum(s.sequence_tokens for s in samples)
    for module in costs.model_spec.modules:
        lengths = [n for s in samples for n in module.instance_lengths(s)]
        some = Workload(tuple(lengths[: max(1, round(share * len(lengths)))]))
        for i, layer in enumerate(module.flat_layers):
            key = f"{module.name}/{layer.kind}"
            if key not in load:
                cost = priced.chunk_costs(Chunk(module.name, (i, i), 0), some)[0]
                load[key] = cost.forward_s + cost.backward_s
    return load


def held_bytes(setup: PaperSetup, costs: EmulatedCosts, layout: Layout, contexts: int) -> list[tuple[int, int]]:
    """Static bytes of every rank, and what it holds under 1F1B of microbatches of so many contexts."""
    whole, found = Workload((setup.context,) * contexts), []
    static = rank_static_bytes(costs, layout)
    for i in layout.chunks_of(layout.modules[-1].name):
        chunk = layout.chunks[i]
        held = costs.chunk_costs(chunk, whole)[0].activation_bytes * (RANKS - chunk.rank)
        if chunk.rank == 0:
            held += costs.boundary_bytes(layout.chunks[0], whole)
        found.append((int(static[chunk.rank]), held))
    return found


def max_contexts(
    setup: PaperSetup, costs: EmulatedCosts, layout: Layout, capacity: int, most: int, times: float = 1.0
) -> int:
    """Largest microbatch, in contexts, of which every rank can hold as many as it has in flight under 1F1B.

    0: none fits. Activations take ``times`` as many bytes as emulated.
    """
    for contexts in range(1, most + 1):
        if any(static + times * held > capacity for static, held in held_bytes(setup, costs, layout, contexts)):
            return contexts - 1
    return most


def batches(setup: PaperSetup, mixture: str, options: Options, size: int = GLOBAL_BATCH) -> Iterator[tuple[int, Batch]]:
    """The batches of every seed: (seed, batch), samples cut to the context."""
    for seed in options.seeds:
        for iteration in range(options.iterations):
            yield seed, batch_of(setup, mixture, seed * 10_000 + iteration, size)


def batch_of(setup: PaperSetup, mixture: str, number: int, size: int = GLOBAL_BATCH) -> Batch:
    """One batch of a mixture."""
    samples = draw_samples(mixture, size, number)
    return Batch(tuple(cut(sample, setup.context, _MOST_IMAGES) for sample in samples), number)


def steps_of(setup: PaperSetup) -> dict[str, TuningSpec]:
    """The settings of Table 2 and Fig. 6, and ours; the paper's ways, one after the other."""
    balance: Policy = "algorithm1_opened"
    return {
        "Original": TuningSpec("random", "fixed", "given", "off"),
        "+ balance algorithm (Balanced)": TuningSpec(balance, "fixed", "given", "off"),
        "+ order and encoder pre-computation": TuningSpec(balance, "fixed", "clusters", "frozen"),
        "+ adaptive microbatch size (PipeTune)": TuningSpec(balance, "multiples", "clusters", "frozen", setup.context),
    }


def ends_of(setup: PaperSetup) -> dict[str, TuningSpec]:
    """Original, Balanced and PipeTune whole."""
    steps = steps_of(setup)
    return {name: steps[name] for name in (ORIGINAL, BALANCED, PIPETUNE)}


OURS = "ours"
OURS_SEARCHED = "ours, searched for longer, any order of tasks"
OURS_BALANCED = "ours, layers balanced with the encoder"
ORIGINAL, BALANCED, REORDERED, PIPETUNE = tuple(steps_of(ON_A["13b"]))


@dataclass(frozen=True, eq=False)
class Run:
    """One batch under one setting; ``seconds`` are those of the emulator, whatever the tables said."""

    tuned: TuningResult
    plan: TunedPlan
    timeline: Timeline

    @property
    def seconds(self) -> float:
        """Of the iteration."""
        return self.timeline.makespan_ns / 1e9


def run_batch(
    setting: EmulatedSetup, batch: Batch, spec: TuningSpec, seed: int, token_budget: int | None = None
) -> Run:
    """Tune a batch by the tables, then time it with the emulator's own costs."""
    tuned = tune(setting.pipeline, batch, token_budget or setting.token_budget, spec, seed)
    plan = tuned_plan(setting.pipeline, batch, tuned, setting.costs, setting.capacity_bytes)
    return Run(tuned, plan, simulate(plan.graph, plan.schedule))


Way = Callable[[Batch, int], float]
"""Seconds of a batch, by the batch and the seed."""
Key = TypeVar("Key")


def tuned_by(setting: EmulatedSetup, spec: TuningSpec, contexts: int | None = None) -> Way:
    """Time batches under a setting, in microbatches of at most so many contexts (None: as many as fit)."""
    budget = None if contexts is None else contexts * setting.setup.context
    return lambda batch, seed: run_batch(setting, batch, spec, seed, budget).seconds


def seconds_by(setup: PaperSetup, mixture: str, options: Options, ways: Mapping[Key, Way]) -> dict[Key, list[float]]:
    """Time all batches of a mixture in several ways, and return the seconds of each."""
    found: dict[Key, list[float]] = {name: [] for name in ways}
    for seed, batch in batches(setup, mixture, options):
        for name, way in ways.items():
            found[name].append(way(batch, seed))
    return found


def means(found: Mapping[Key, Sequence[float]]) -> dict[Key, float]:
    """Return the mean of every list."""
    return {name: float(np.mean(values)) for name, values in found.items()}


def static_sizes(setting: EmulatedSetup) -> tuple[int, ...]:
    """Sizes of a microbatch, in contexts, that a user would try: powers of two, and the largest that fits."""
    return tuple(sorted({k for k in (1, 2, 4, 8) if k < setting.max_contexts} | {setting.max_contexts}))


def best_static(setup: PaperSetup, mixture: str, options: Options, name: str) -> tuple[int, float]:
    """The size that is best for a mixture when it is kept for all batches, and its mean seconds.

    Parameters
    ----------
    name : str
        One of `steps_of` with a fixed size; all else is as it says.
    """
    setting, spec = emulated(setup), steps_of(setup)[name]
    mean = means(seconds_by(setup, mixture, options, {k: tuned_by(setting, spec, k) for k in static_sizes(setting)}))
    best = min(mean, key=lambda k: mean[k])
    return best, mean[best]


def searched_by(setting: EmulatedSetup, options: Options) -> Way:
    """Time batches under ours as a planner has it: half of the search goes to tuning, half to orders beyond 1F1B."""
    half = Budget(seconds=options.search_s / 2, clock="cpu")

    def seconds(batch: Batch, seed: int) -> float:
        tuned = tune(setting.pipeline, batch, setting.token_budget, TuningSpec(), seed, half)
        plan = tuned_plan(setting.pipeline, batch, tuned, setting.costs, setting.capacity_bytes)
        found = solve(plan.graph, budget=half, seed=seed)
        return min(simulate(plan.graph, plan.schedule).makespan_ns, found.timeline.makespan_ns) / 1e9

    return seconds


def mean_seconds(
    setup: PaperSetup, mixture: str, options: Options, settings: dict[str, TuningSpec] | None = None
) -> dict[str, float]:
    """Mean iteration time under every setting (None: Table 2's, and a search after ours) and ours, same batches."""
    setting = emulated(setup)
    ways = {name: tuned_by(setting, spec) for name, spec in (settings or steps_of(setup)).items()}
    ways[OURS] = tuned_by(setting, TuningSpec())
    if settings is None:
        ways[OURS_SEARCHED] = searched_by(setting, options)
    ways[OURS_BALANCED] = tuned_by(emulated(setup, even=False), TuningSpec())
    return means(seconds_by(setup, mixture, options, ways))


def change(before: float, after: float) -> str:
    """By how much less time."""
    return f"{100 * (after / before - 1):+.1f} %"
