"""Costs from a trace: of stages, of their layers where modules were recorded, by the size of microbatches."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from statistics import fmean, median

from pipeloom.cost import LayerMeasurement, Profile, fit_profile
from pipeloom.cost.layers import LayerCost, LayerTable
from pipeloom.errors import InputError
from pipeloom.explain.traces.messages import link_medians, link_of
from pipeloom.explain.traces.replay import ReplayGraph
from pipeloom.explain.traces.traced import Iteration, TracedRun, Unit
from pipeloom.taskgraph import BACKWARD, FORWARD, INPUT_GRADIENT, NS_PER_S, WEIGHT_GRADIENT

Shape = tuple[int, ...]


def shapes_of(iteration: Iteration) -> dict[int, Shape]:
    """Shape of what every microbatch sends from stage to stage; empty where shapes were not recorded."""
    return {
        unit.microbatch: one.shape
        for of_rank in iteration.posted
        for unit, one in of_rank.items()
        if unit.kind == FORWARD and one.shape
    }


def compute_means(run: TracedRun) -> dict[tuple[int, int, Shape], float]:
    """Mean nanoseconds of a computation, by kind, stage and shape of the microbatch."""
    found: dict[tuple[int, int, Shape], list[int]] = defaultdict(list)
    for iteration in run.iterations:
        shapes = shapes_of(iteration)
        for rank in iteration.ranks:
            for one in rank:
                shape = shapes.get(one.unit.microbatch, ())
                found[one.unit.kind, one.unit.stage, shape].append(one.end_ns - one.start_ns)
    return {key: fmean(samples) for key, samples in found.items()}


def task_means(run: TracedRun, made: Sequence[ReplayGraph]) -> dict[Unit, int]:
    """Mean nanoseconds that tasks of a kind, a stage and a shape keep their rank, for every unit of an iteration."""
    shapes = [shapes_of(iteration) for iteration in run.iterations]
    found: dict[tuple[int, int, Shape], list[int]] = defaultdict(list)
    for each, of in zip(made, shapes, strict=True):
        for unit, duration in zip(_units(run), each.graph.duration_ns.tolist(), strict=True):
            found[unit.kind, unit.stage, of.get(unit.microbatch, ())].append(duration)
    return {
        unit: round(fmean(found[unit.kind, unit.stage, shapes[0].get(unit.microbatch, ())])) for unit in _units(run)
    }


def delay_medians(run: TracedRun, made: Sequence[ReplayGraph]) -> dict[Unit, int]:
    """Median nanoseconds of the messages on its link, for every unit with an input from another rank."""
    usual = link_medians(run, [each.messages for each in made])
    return {unit: usual[link_of(run, unit)] for unit in made[0].messages}


def _units(run: TracedRun) -> list[Unit]:
    return sorted(one.unit for rank in run.iterations[0].ranks for one in rank)


def layer_table(
    run: TracedRun, name: str, boundary_ns: float, shares: Mapping[int, Sequence[tuple[str, float, float]]]
) -> LayerTable:
    """Write the measured costs as layers, for microbatches of the commonest shape.

    Parameters
    ----------
    boundary_ns : float
        Of a message between ranks.
    shares : mapping
        Of a stage its layers with their shares of its forward and of its backward, from `layer_shares`; a stage that
        is not in it is one layer.

    Returns
    -------
    LayerTable
        Bytes are `stage_bytes`, shared among layers as the forward's time (activations) and the backward's
        (parameters); 0 where memory was not recorded.
    """
    means = compute_means(run)
    shape = Counter(shape for _, _, shape in means).most_common(1)[0][0]
    sizes = [
        one.num_bytes for it in run.iterations for rank in it.posted for one in rank.values() if one.shape == shape
    ]
    layers = []
    num_bytes = stage_bytes(run, shape)
    for stage in range(run.num_stages):
        seconds = {kind: means.get((kind, stage, shape), 0.0) / NS_PER_S for kind in range(4)}
        split = (WEIGHT_GRADIENT, stage, shape) in means
        held, parameters = num_bytes.get(stage, (0, 0))
        for layer, forward, backward in shares.get(stage, ((f"stage.{stage}", 1.0, 1.0),)):
            layers.append(
                LayerCost(
                    name=layer,
                    forward_s=seconds[FORWARD] * forward,
                    activation_bytes=round(held * forward),
                    parameter_bytes=round(parameters * backward),
                    backward_s=None if split else seconds[BACKWARD] * backward,
                    backward_input_s=seconds[INPUT_GRADIENT] * backward if split else None,
                    backward_weight_s=seconds[WEIGHT_GRADIENT] * backward if split else None,
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


def stage_bytes(run: TracedRun, shape: Shape) -> dict[int, tuple[int, int]]:
    """Bytes of every stage, where memory was recorded: what a forward leaves allocated, and the parameters.

    The first backward of an iteration makes the gradients, which have the bytes of their parameters; so these are what
    it takes above the backwards behind it. Where gradients were kept since the last iteration they are not seen.

    Parameters
    ----------
    shape : tuple of int
        Of the microbatches that activations are asked of.
    """
    held: dict[int, list[int]] = defaultdict(list)
    made: dict[int, list[int]] = defaultdict(list)
    for iteration in run.iterations:
        shapes = shapes_of(iteration)
        for computations, allocated in zip(iteration.ranks, iteration.allocated, strict=False):
            backwards: dict[tuple[int, int], list[int]] = defaultdict(list)
            for unit in (one.unit for one in computations if one.unit in allocated):
                if unit.kind != FORWARD:
                    backwards[unit.stage, unit.kind].append(allocated[unit])
                elif shapes.get(unit.microbatch, ()) == shape:
                    held[unit.stage].append(allocated[unit])
            for (stage, kind), taken in backwards.items():
                if kind != INPUT_GRADIENT and len(taken) > 1:
                    made[stage].append(round(taken[0] - median(taken[1:])))
    return {
        stage: (max(0, round(median(taken))), max(0, round(median(made[stage]))) if made[stage] else 0)
        for stage, taken in held.items()
    }


def stage_profile(runs: Sequence[TracedRun], machine: str) -> Profile:
    """Fit the costs of every stage over the shapes of microbatches in one or more runs of the same stages.

    A microbatch of shape (instances, length, width) counts as so many sequences of that length, one of shape
    (tokens, width) as one sequence.

    Raises
    ------
    InputError
        A trace without shapes.
    """
    rows = []
    for run in runs:
        means = compute_means(run)
        for (kind, stage, shape), forward in means.items():
            if not shape:
                raise InputError(run.sources[0], "has no shapes of messages", "record it with record_shapes=True")
            if kind == FORWARD:
                backward = sum(means.get((k, stage, shape), 0.0) for k in (BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT))
                lengths = (shape[-2],) * prod(shape[:-2]) if len(shape) > 1 else shape
                rows.append(
                    LayerMeasurement("model", f"stage.{stage}", lengths, forward / NS_PER_S, backward / NS_PER_S, 0)
                )
    return fit_profile(rows, machine)
