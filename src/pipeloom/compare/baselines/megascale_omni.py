"""MegaScale-Omni: encoders on all ranks, a pipelined backbone, and samples reordered by time.

Source: the abstract of arXiv 2605.08962 (EuroSys 2026); there is no public code. According to the abstract, encoders
and language model share all ranks but not their parallelism, short and long sequences are encoded in different ways,
both run in a joint pipeline, data loaders reorder samples in groups so that work is even, and encodings are
redistributed to the ranks that read them.

Assumptions are documented with each part: the order in `joint_pipeline`, the encoders' parallelism in
`LongShortCosts`. Reordering makes microbatches even in the backbone's time and in total time, with images for all
devices of a rank (`pipeloom.compare.repacking`). Samples of a microbatch are sorted by their longest image, so images
of similar length are encoded together. Reordering among replicas is not modeled: one replica with mean work represents
all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from pipeloom.compare.baseline import System, in_turn, standing
from pipeloom.compare.baselines.optimus import encoders_apart, encoders_first
from pipeloom.compare.baselines.optimus_orders import backbone_alone, by_start, optimus_coarse, places
from pipeloom.compare.baselines.replicated_encoders import LongShortCosts, ReplicatedEncoderCosts
from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster, assignable_of
from pipeloom.compare.recomputation import per_module_recomputation
from pipeloom.compare.repacking import reordered
from pipeloom.compare.result import BaselineResult, fastest
from pipeloom.errors import InfeasibleError, check_count
from pipeloom.layout import modality_placements, replicated
from pipeloom.layout.layouts import with_modules
from pipeloom.layout.modality import typical_lengths
from pipeloom.search import Budget
from pipeloom.spec import Layout, Sample
from pipeloom.taskgraph import FORWARD, Assignable, TaskGraph
from pipeloom.timeline import Schedule

NAME = "MegaScale-Omni"
_BEST_CHUNK_COUNTS = 2
"""Number of best chunk counts on sampled iterations for which other sizes of parts are tried."""
SIZES = (1, 2, 4, 8, 16)
"""Numbers of images or recordings that a rank encodes together."""


def megascale_omni(setting: ModelOnCluster, batches: Sequence[Microbatches]) -> System:
    """Make MegaScale-Omni: whole encoders on every rank, and an interleaved backbone.

    The sampled iterations decide the number of chunks, with the backbone balanced by time and by parameters, then the
    sizes of the encoders' parts, with the best packing of each. Every iteration uses the best of several packings,
    group sizes, assignments of parts to ranks, and recomputation settings of encoders and backbone. Iterations that do
    not fit run with encoders pipelined over all ranks.
    """
    own, apart = LongShortCosts(setting), encoders_apart(setting, batches)
    wholes = [replicated(one, [m.name for m in one.modules[:-1]]) for one in apart]
    start = _rule_sizes(setting, batches)
    first = [_option(setting, _resized(one, start), own) for one in wholes]
    first.sort(key=lambda option: standing(option, batches, seconds=setting.iteration_s))
    del first[_BEST_CHUNK_COUNTS:]
    sizes: list[Mapping[str, int | None]] = [start, *(dict.fromkeys(start, size) for size in SIZES)]
    layouts = [_resized(one.layout, each) for one in first for each in sizes]
    options = [_option(setting, layout, own) for layout in dict.fromkeys(layouts)]
    if setting.degrees.tensor > 1:
        # A divided encoder may fit where a whole one does not.
        divided = ReplicatedEncoderCosts(setting)
        options += [_option(setting, one.layout, divided) for one in first]
    last = encoders_first(NAME, setting, apart)
    return reordered(in_turn(NAME, options, batches, last, seconds=setting.iteration_s), setting)


def _option(setting: ModelOnCluster, layout: Layout, costs: ReplicatedEncoderCosts) -> System:
    """Make the system of one layout, with the best group size and assignment for every iteration."""
    update_ns = replace(setting, costs=costs).update_ns(layout)

    def run(microbatches: Microbatches, _budget: Budget, _seed: int) -> BaselineResult:
        assignable = assignable_of(setting, layout, [_longest_first(group) for group in microbatches], NAME, costs)
        found = []
        sizes = (setting.num_ranks, 2 * setting.num_ranks, len(microbatches))
        for size in sorted({min(each, len(microbatches)) for each in sizes}):
            for assigned in (assignable, assigned_in_groups(assignable, size)):
                with suppress(InfeasibleError):
                    order = joint_pipeline(assigned.graph, size)
                    found.append(per_module_recomputation(NAME, layout, assigned.graph, order))
        return replace(fastest(NAME, found), update_ns=update_ns)

    return System(NAME, layout, run)


def joint_pipeline(graph: TaskGraph, group_size: int) -> Schedule:
    """Put the encoders' passes of every group of microbatches around the backbone's passes of that group.

    The exact order of passes is unknown. Assumption: all ranks encode a group of microbatches together right before the
    backbone's first pass of the group, and run their backwards right after its last pass. The backbone, the last
    module, runs interleaved 1F1B. One group of all microbatches is Optimus' coarse order. Raise `InputError` as
    `optimus_coarse`, or if groups are empty.
    """
    check_count("group_size", group_size)
    coarse = optimus_coarse(graph)
    encodes = graph.module != len(graph.module_names) - 1
    start = backbone_alone(graph, coarse)
    group = graph.microbatch // group_size
    forward = graph.kind == FORWARD
    end = start + graph.duration_ns
    for number in range(int(group.max()) + 1):
        mine = group == number
        start[mine & encodes & forward] = start[mine & ~encodes].min()
        start[mine & encodes & ~forward] = end[mine & ~encodes].max()
    return by_start(graph, start, places(graph, coarse), "joint pipeline")


def assigned_in_groups(assignable: Assignable, group_size: int) -> Assignable:
    """Assign the parts of every group of microbatches to ranks by time, longest first to the least loaded rank.

    So each group is encoded as early as possible. The graph's own assignment balances the total work of ranks.
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
    """Sort samples by their largest image, so that images of similar length are in one part."""
    return sorted(group, key=lambda sample: -max((*sample.patches, *sample.audio_seconds), default=0))


def _rule_sizes(setting: ModelOnCluster, batches: Sequence[Microbatches]) -> dict[str, int | None]:
    """Return the smallest part of every encoder with which each device of a rank is efficient."""
    typical = typical_lengths(setting.model, [group for microbatches in batches for group in microbatches])
    places = modality_placements(setting.model, setting.costs, setting.num_ranks, typical)
    return {module.name: places[module.name].sub_microbatch for module in setting.model.modules[:-1]}


def _resized(layout: Layout, sizes: Mapping[str, int | None]) -> Layout:
    for name, size in sizes.items():
        if size is not None:
            layout = with_modules(layout, [name], sub_microbatch=size)
    return layout
