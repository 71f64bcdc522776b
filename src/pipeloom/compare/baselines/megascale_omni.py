"""MegaScale-Omni as its users run it: encoders on all ranks, the backbone pipelined, samples reordered by time.

Source: the abstract of arXiv 2605.08962 (EuroSys 2026); there is no public code. What it says: encoders and language
model share all ranks but not their parallelism; short and long sequences are encoded in ways of their own; both run
in a joint pipeline; loaders reorder samples in groups so that work is even; encodings are dealt anew to the ranks that
read them. What is assumed is documented with each part: the order in `megascale_omni_order`, the encoders' parallelism
in `megascale_omni_costs`. Reordering makes microbatches even in the backbone's time and in all time, with images for
all devices of a rank alike (`pipeloom.compare.repacking`); images of like length go through the encoder together, since
each sample's place in its microbatch is by its longest. Reordering among replicas is not here: one replica stands for
all, and its work is taken to be the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from pipeloom.compare.baseline import System, in_turn, replica_seconds, standing
from pipeloom.compare.baselines.megascale_omni_costs import LongShortCosts
from pipeloom.compare.baselines.megascale_omni_order import joint_pipeline
from pipeloom.compare.baselines.optimus import encoders_apart, encoders_first
from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster, assignable_of
from pipeloom.compare.recomputation import per_module_recomputation
from pipeloom.compare.repacking import reordered
from pipeloom.compare.result import BaselineResult
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.errors import InfeasibleError
from pipeloom.layout import modality_placements, replicated
from pipeloom.layout.choose import resized as in_parts_of
from pipeloom.layout.modality import typical_lengths
from pipeloom.search import StoppingRule
from pipeloom.spec import Layout, Sample
from pipeloom.taskgraph import Assignable

NAME = "MegaScale-Omni"
NEAR = 2
"""Numbers of chunks, the fastest on sampled iterations, with which other sizes of parts are tried."""
SIZES = (1, 2, 4, 8, 16)
"""Images, or recordings, that a rank encodes together."""


def megascale_omni(case: ModelOnCluster, batches: Sequence[Microbatches]) -> System:
    """Encoders whole on every rank, and the backbone interleaved with as many chunks as are fastest.

    First the number of chunks, the backbone cut by time and by parameters, then sizes of the encoders' parts, each
    judged on the sampled iterations. Every iteration has the best of several packings, sizes of groups, dealings of
    parts to ranks, and settings of recomputation for encoders and backbone. What does not fit runs with the encoders
    pipelined over all ranks.
    """
    own = LongShortCosts(case)
    after_s = _reduction(case, own)
    wholes = [replicated(one, [m.name for m in one.modules[:-1]]) for one in encoders_apart(case, batches)]
    start = _rule_sizes(case, batches)
    begun = [_option(case, _resized(one, start), own, after_s) for one in wholes]
    begun.sort(key=lambda option: standing(option, batches))
    sizes: list[Mapping[str, int | None]] = [start]
    sizes += [dict.fromkeys(start, size) for size in SIZES]
    layouts = [_resized(one.layout, each) for one in begun[:NEAR] for each in sizes]
    options = [_option(case, layout, own, after_s) for layout in dict.fromkeys(layouts)]
    if case.degrees.tensor > 1:
        # Whole on every device an encoder may not fit where it fits divided.
        options += [
            _option(case, one.layout, case.levels, lambda layout: replica_seconds(case, layout)) for one in begun[:NEAR]
        ]
    last = encoders_first(NAME, case, encoders_apart(case, batches))
    return reordered(in_turn(NAME, options, batches, last), case)


def _option(case: ModelOnCluster, layout: Layout, costs: EmulatedCosts, after_s: Callable[[Layout], float]) -> System:
    """One layout: the best size of groups and dealing for every iteration."""

    def run(groups: Microbatches, _budget: StoppingRule, _seed: int) -> BaselineResult:
        made = assignable_of(case, layout, [_longest_first(group) for group in groups], NAME, costs)
        found = []
        for size in sorted({min(each, len(groups)) for each in (case.num_ranks, 2 * case.num_ranks, len(groups))}):
            for dealt in (made, dealt_in_groups(made, size)):
                with suppress(InfeasibleError):
                    order = joint_pipeline(dealt.graph, size)
                    found.append(per_module_recomputation(NAME, layout, dealt.graph, order))
        if not found:
            raise InfeasibleError(f"{NAME}: does not fit even with full recomputation")
        best = min(found, key=lambda one: one.timeline.makespan_ns)
        return replace(best, after_s=after_s(layout))

    return System(NAME, layout, run)


def dealt_in_groups(assignable: Assignable, group_size: int) -> Assignable:
    """Deal the parts of every group of microbatches to all ranks by time, longest first to the one with least.

    So a group is encoded as soon as it can be; the graph's own dealing evens out what ranks have to do in all.
    """
    graph = assignable.graph
    seconds = np.bincount(graph.pair, weights=graph.duration_ns, minlength=graph.num_pairs)
    group = graph.microbatch[graph.forward_of] // group_size
    home = assignable.assignment.copy()
    for number in range(int(group.max()) + 1):
        load = np.zeros(graph.num_ranks)
        mine = np.flatnonzero(assignable.free & (group == number))
        for pair in mine[np.argsort(-seconds[mine], kind="stable")].tolist():
            home[pair] = int(load.argmin())
            load[home[pair]] += seconds[pair]
    return assignable.assigned(home)


def _longest_first(group: Sequence[Sample]) -> list[Sample]:
    """Samples with the largest images first, so that images of like length are in one part."""
    return sorted(group, key=lambda sample: -max((*sample.patches, *sample.audio_seconds), default=0))


def _rule_sizes(case: ModelOnCluster, batches: Sequence[Microbatches]) -> dict[str, int | None]:
    """Of every encoder, the smallest part that each device of a rank is efficient with."""
    typical = typical_lengths(case.model, [group for groups in batches for group in groups])
    places = modality_placements(case.model, case.costs, case.num_ranks, typical)
    return {module.name: places[module.name].sub_microbatch for module in case.model.modules[:-1]}


def _resized(layout: Layout, sizes: Mapping[str, int | None]) -> Layout:
    for name, size in sizes.items():
        if size is not None:
            layout = in_parts_of(layout, name, size)
    return layout


def _reduction(case: ModelOnCluster, costs: LongShortCosts) -> Callable[[Layout], float]:
    parameters = {m.name: sum(layer.num_parameters for layer in m.flat_layers) for m in case.model.modules}
    return lambda layout: costs.reduction_s(layout, parameters)
