"""Costs from a trace, by stage, by layer if modules were recorded, and by shape of microbatches."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from statistics import fmean, median

from pipeloom.cost import LayerMeasurement, Profile, fit_profile
from pipeloom.cost.layers import BYTES_PER_PARAMETER, LayerCost, LayerTable
from pipeloom.errors import InputError
from pipeloom.explain.traces.messages import link_medians, link_of
from pipeloom.explain.traces.replay import ReplayGraph
from pipeloom.explain.traces.traced import Iteration, TracedRun, Unit
from pipeloom.taskgraph import BACKWARD, FORWARD, INPUT_GRADIENT, NS_PER_S, WEIGHT_GRADIENT

Shape = tuple[int, ...]


def shapes_of(iteration: Iteration) -> dict[int, Shape]:
    """Return the shape of every microbatch's activation between stages; empty if shapes were not recorded."""
    return {
        unit.microbatch: one.shape
        for of_rank in iteration.posted
        for unit, one in of_rank.items()
        if unit.kind == FORWARD and one.shape
    }


def durations(run: TracedRun) -> dict[tuple[int, int, Shape], list[int]]:
    """Return the nanoseconds of all computations, by kind, stage and shape of the microbatch."""
    found: dict[tuple[int, int, Shape], list[int]] = defaultdict(list)
    for iteration in run.iterations:
        shapes = shapes_of(iteration)
        for rank in iteration.ranks:
            for one in rank:
                shape = shapes.get(one.unit.microbatch, ())
                found[one.unit.kind, one.unit.stage, shape].append(one.end_ns - one.start_ns)
    return dict(found)


def _common_shape(run: TracedRun) -> Shape:
    """Return the shape of most microbatches; of shapes with equally many, the first."""
    counts: Counter[Shape] = Counter()
    for iteration in run.iterations:
        shapes = shapes_of(iteration)
        microbatches = sorted({one.unit.microbatch for rank in iteration.ranks for one in rank})
        counts.update(shapes.get(microbatch, ()) for microbatch in microbatches)
    return counts.most_common(1)[0][0]


def task_means(run: TracedRun, replayed: Sequence[ReplayGraph]) -> dict[Unit, int]:
    """Return the mean nanoseconds that each unit occupies its rank, over units of the same kind, stage and shape."""
    shapes = [shapes_of(iteration) for iteration in run.iterations]
    found: dict[tuple[int, int, Shape], list[int]] = defaultdict(list)
    for each, shape_of in zip(replayed, shapes, strict=True):
        for unit, duration in zip(_units(run), each.graph.duration_ns.tolist(), strict=True):
            found[unit.kind, unit.stage, shape_of.get(unit.microbatch, ())].append(duration)
    return {
        unit: round(fmean(found[unit.kind, unit.stage, shapes[0].get(unit.microbatch, ())])) for unit in _units(run)
    }


def delay_medians(run: TracedRun, replayed: Sequence[ReplayGraph]) -> dict[Unit, int]:
    """Return the median nanoseconds of messages on its link, for every unit with an input from another rank."""
    medians = link_medians(run, [each.messages for each in replayed])
    return {unit: medians[link_of(run, unit)] for unit in replayed[0].messages}


def _units(run: TracedRun) -> list[Unit]:
    return sorted(one.unit for rank in run.iterations[0].ranks for one in rank)


def layer_table(
    run: TracedRun, name: str, boundary_ns: float, shares: Mapping[int, Sequence[tuple[str, float, float]]]
) -> LayerTable:
    """Convert the measured costs to layers, for microbatches of the most common shape.

    ``boundary_ns`` is the time of a message between ranks. ``shares`` has the layers by stage, with their shares of its
    forward and of its backward, from `layer_shares`; other stages are one layer.

    Bytes are `stage_bytes`, divided among layers in proportion to the time of their forward (activations) and backward
    (gradients); 0 if memory was not recorded. If messages are wider than half precision, so are parameters, gradients
    and both numbers of Adam.
    """
    means = {key: fmean(samples) for key, samples in durations(run).items()}
    shape = _common_shape(run)
    sizes = [
        one.num_bytes for it in run.iterations for rank in it.posted for one in rank.values() if one.shape == shape
    ]
    layers = []
    num_bytes, width = stage_bytes(run, shape), _element_bytes(run)
    for stage in range(run.num_stages):
        seconds = {kind: means.get((kind, stage, shape), 0.0) / NS_PER_S for kind in range(4)}
        split = (WEIGHT_GRADIENT, stage, shape) in means
        held, gradients = num_bytes.get(stage, (0, 0))
        for layer, forward, backward in shares.get(stage, ((f"stage.{stage}", 1.0, 1.0),)):
            of_layer = round(gradients * backward)
            layers.append(
                LayerCost(
                    name=layer,
                    forward_s=seconds[FORWARD] * forward,
                    activation_bytes=round(held * forward),
                    parameter_bytes=of_layer * BYTES_PER_PARAMETER // width,
                    backward_s=None if split else seconds[BACKWARD] * backward,
                    backward_input_s=seconds[INPUT_GRADIENT] * backward if split else None,
                    backward_weight_s=seconds[WEIGHT_GRADIENT] * backward if split else None,
                    static_bytes=4 * of_layer if gradients and width > BYTES_PER_PARAMETER else None,
                )
            )
    return LayerTable(
        name=name,
        num_ranks=run.num_ranks,
        num_microbatches=run.num_microbatches,
        boundary_s=boundary_ns / NS_PER_S,
        boundary_bytes=max(sizes, default=0),
        layers=tuple(layers),
    )


def _element_bytes(run: TracedRun) -> int:
    """Return the bytes of a number in messages between stages, at least those of half precision (also if unknown)."""
    messages = [one for each in run.iterations for rank in each.posted for one in rank.values() if one.num_bytes]
    return max((BYTES_PER_PARAMETER, *(one.num_bytes // prod(one.shape) for one in messages)))


def stage_bytes(run: TracedRun, shape: Shape) -> dict[int, tuple[int, int]]:
    """Return the bytes of activations and of gradients by stage; empty if memory was not recorded.

    Activations are the bytes that a forward of a microbatch of this ``shape`` leaves allocated. The first backward of
    an iteration that computes gradients of parameters allocates them. So gradients are its bytes above those of later
    backwards of its kind; they are 0 if gradients were kept from the previous iteration.
    """
    held: dict[int, list[int]] = defaultdict(list)
    gradients: dict[int, list[int]] = defaultdict(list)
    for iteration in run.iterations:
        shapes = shapes_of(iteration)
        for computations, allocated in zip(iteration.ranks, iteration.allocated, strict=False):
            backwards: dict[int, list[int]] = defaultdict(list)
            first: dict[int, int] = {}
            for unit in (one.unit for one in computations if one.unit in allocated):
                if unit.kind == FORWARD:
                    if shapes.get(unit.microbatch, ()) == shape:
                        held[unit.stage].append(allocated[unit])
                elif unit.kind != INPUT_GRADIENT and first.setdefault(unit.stage, unit.kind) == unit.kind:
                    backwards[unit.stage].append(allocated[unit])
            for stage, taken in backwards.items():
                if len(taken) > 1:
                    gradients[stage].append(round(taken[0] - median(taken[1:])))
    return {
        stage: (max(0, round(median(taken))), max(0, round(median(gradients[stage]))) if gradients[stage] else 0)
        for stage, taken in held.items()
    }


def stage_profile(runs: Sequence[TracedRun], machine: str) -> Profile:
    """Fit the costs of every stage to the shapes of microbatches in runs of the same stages.

    A microbatch of shape (instances, length, width) counts as that number of sequences, and one of shape (tokens,
    width) as one sequence. Raise `InputError` if a trace has no shapes.
    """
    rows = []
    for run in runs:
        found = durations(run)
        for (kind, stage, shape), forwards in found.items():
            if not shape:
                raise InputError(run.sources[0], "has no shapes of messages", "record it with record_shapes=True")
            if kind == FORWARD:
                whole, inputs, weights = (
                    found.get((k, stage, shape), []) for k in (BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
                )
                # A schedule may split the backwards of some microbatches only.
                count = len(whole) + max(len(inputs), len(weights))
                backward = sum((*whole, *inputs, *weights)) / max(count, 1)
                lengths = (shape[-2],) * prod(shape[:-2]) if len(shape) > 1 else shape
                seconds = (fmean(forwards) / NS_PER_S, backward / NS_PER_S)
                rows.append(LayerMeasurement("model", f"stage.{stage}", lengths, *seconds, 0))
    return fit_profile(rows, machine)
