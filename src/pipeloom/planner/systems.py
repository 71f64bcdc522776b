"""Training systems as their users run them, each timed on the same costs, memory and simulator (`dip.txt` §7.1).

A system is prepared once on sampled iterations (its layout), and then times any iteration. Systems that
recompute the same way all along get, for every iteration, the fastest of their settings that fits; this favours
them, since a real run must keep one setting that fits every iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from pipeloom.arrange import LayerLoad, ModulePlacement, chain, even_layout, modality_placements, separate
from pipeloom.baselines import (
    best_stages,
    fsdp_seconds,
    interleaved_one_f_one_b,
    one_f_one_b,
    optimus_coarse,
    zero_bubble_h1,
)
from pipeloom.cost import CostModel
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.emulator.static import GRADIENT_BYTES
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.planner.case import (
    LEVELS,
    Case,
    Groups,
    graph_of,
    layer_seconds,
    model_flops,
    pack_groups,
    typical_lengths,
    workspace_bytes,
)  # fmt: skip
from pipeloom.planner.compare import SystemTimeline
from pipeloom.planner.recomputation import (
    level_tables,
    per_module_recomputation,
    per_rank_recomputation,
    uniform_recomputation,
)  # fmt: skip
from pipeloom.search import Evaluations, StoppingRule, first_in_first_out, levels_by_time, solve
from pipeloom.spec import Chunk, LayerSpec, Layout, ModuleLayout
from pipeloom.spec.hardware import Degrees
from pipeloom.taskgraph import IntArray, TaskGraph
from pipeloom.timeline import Schedule, lower_bound, simulate

Order = Callable[[TaskGraph], Schedule]
Recompute = Callable[[str, Layout, TaskGraph, Schedule], SystemTimeline]
MOST_CHUNKS = 4
"""Chunks per rank that are tried for interleaved schedules."""


@dataclass(frozen=True, eq=False)
class System:
    """A system that has its layout.

    ``run`` times an iteration: the samples of every microbatch, how long to search, a seed. It raises
    `InfeasibleError` where the iteration does not fit, with the most recomputation that the system has.
    """

    name: str
    layout: Layout
    run: Callable[[Groups, StoppingRule, int], SystemTimeline]


def by_parameters(_case: Case, _batches: Sequence[Groups]) -> LayerLoad:
    """Balance layers by their parameters."""
    return lambda _module, layer: float(max(1, layer.num_parameters))


def by_time(case: Case, batches: Sequence[Groups]) -> LayerLoad:
    """Balance layers by their mean time on the sampled iterations."""
    seconds = layer_seconds(case, batches)
    return lambda module, layer: seconds[f"{module}/{layer.kind}"]


def by_count(_module: str, layer: LayerSpec) -> float:
    """Balance the number of blocks, as the papers' ``L / (P K)``; embeddings, adapters and heads hardly count."""
    return 1.0 if layer.kind.startswith("block") else 0.01


def megatron_1f1b(case: Case, batches: Sequence[Groups], balance: str = "parameters") -> System:
    """Megatron-LM's 1F1B: one chain of stages."""
    layout = chain(case.model, case.num_ranks, 1, _load(case, batches, balance))
    return fixed_system(f"1F1B by {balance}", case, layout, one_f_one_b)


def megatron_interleaved(case: Case, batches: Sequence[Groups], balance: str = "parameters") -> System:
    """Megatron-LM's interleaved 1F1B, with the number of chunks that is best on the sampled iterations."""
    load, name = _load(case, batches, balance), f"interleaved by {balance}"
    options = [
        fixed_system(name, case, chain(case.model, case.num_ranks, v, load), interleaved_one_f_one_b)
        for v in range(2, MOST_CHUNKS + 1)
        if case.num_ranks * v <= sum(len(m.flat_layers) for m in case.model.modules)
    ]
    if not options:
        return fixed_system(name, case, chain(case.model, case.num_ranks, 1, load), interleaved_one_f_one_b)
    return _fastest(options, batches)


def zero_bubble(case: Case, batches: Sequence[Groups], balance: str = "time") -> System:
    """Zero-bubble H1: 1F1B's chain of stages with split backwards, weight gradients filling the idle time.

    Recomputed activations wait for the weight gradients, so these come as late as memory allows, whichever number
    of microbatches behind is best for the iteration.
    """
    layout = chain(case.model, case.num_ranks, 1, _load(case, batches, balance))
    costs = EmulatedCosts(case.architecture, case.machine, case.degrees, LEVELS)

    def run(groups: Groups, _budget: StoppingRule, _seed: int) -> SystemTimeline:
        graph = graph_of(case, layout, groups, "zero-bubble H1", costs, split_backward=True)
        best: SystemTimeline | None = None
        for behind in range(case.num_ranks):
            with suppress(InfeasibleError):
                found = uniform_recomputation("zero-bubble H1", layout, graph, zero_bubble_h1(graph, behind))
                if best is None or found.timeline.makespan_ns < best.timeline.makespan_ns:
                    best = found
        if best is None:
            raise InfeasibleError("zero-bubble H1: does not fit even with full recomputation")
        return best

    return System("zero-bubble H1", layout, run)


def nnscaler(case: Case, batches: Sequence[Groups]) -> System:
    """nnScaler*: the best static stages and recomputation for the mean microbatch, run by 1F1B."""
    layers = [(m.name, i, layer) for m in case.model.modules for i, layer in enumerate(m.flat_layers)]
    seconds, held = level_tables(case, batches)
    kept = [case.levels.static_bytes(Chunk(module, (i, i), 0)) for module, i, _ in layers]
    shared = workspace_bytes(
        case.levels, chain(case.model, case.num_ranks, 1, by_parameters(case, batches)),
        pack_groups(case, chain(case.model, case.num_ranks, 1, by_parameters(case, batches)), batches[0]),
    )  # fmt: skip
    stages = best_stages(seconds, held, np.array(kept, float), case.num_ranks, case.capacity_bytes - shared)
    chunks: list[Chunk] = []
    for rank in range(case.num_ranks):
        here = layers[stages.cuts[rank] : stages.cuts[rank + 1]]
        for name in dict.fromkeys(module for module, _, _ in here):
            numbers = [i for module, i, _ in here if module == name]
            chunks.append(Chunk(name, (numbers[0], numbers[-1]), rank))
    modules = tuple(ModuleLayout(m.name, m.after, m.frozen) for m in case.model.modules)
    layout = Layout(case.num_ranks, modules, tuple(chunks))

    def run(groups: Groups, _budget: StoppingRule, _seed: int) -> SystemTimeline:
        graph = graph_of(case, layout, groups, "nnScaler*", case.levels)
        return per_rank_recomputation("nnScaler*", layout, graph, one_f_one_b(graph), np.array(stages.levels))

    return System("nnScaler*", layout, run)


def optimus(case: Case, batches: Sequence[Groups]) -> System:
    """Optimus, coarse-grained: encoders over all ranks before the backbone, their gradients after it."""
    if len(case.model.modules) < 2:
        raise InputError("model", "has one module", "Optimus wants encoders and a backbone")
    load = by_time(case, batches)
    counts = [
        v for v in range(1, MOST_CHUNKS + 1) if len(case.model.modules[-1].flat_layers) >= v * case.num_ranks
    ]
    options = []
    for v in counts:
        layout = separate(case.model, case.num_ranks, {case.model.modules[-1].name: ModulePlacement(v)}, load)
        options.append(fixed_system("Optimus coarse", case, layout, optimus_coarse, per_module_recomputation))
    return _fastest(options, batches)


def partitioned(case: Case, batches: Sequence[Groups]) -> System:
    """DIP's layout under Megatron-LM's interleaved order (the first step of `dip.txt` Table 5)."""
    return fixed_system(
        "modality-aware, static order", case, dip_layout(case, batches), interleaved_one_f_one_b
    )


def dip_layout(case: Case, batches: Sequence[Groups]) -> Layout:
    """DIP's layout as published: sizes and segments by its rules, equal numbers of layers."""
    places = _placements_by_rule(case, batches)
    return separate(case.model, case.num_ranks, places, by_count)


def our_layout(case: Case, batches: Sequence[Groups]) -> Layout:
    """The paper's sizes and segments, with layers dealt so that all ranks have equal time."""
    places = _placements_by_rule(case, batches)
    return even_layout(case.model, case.num_ranks, places, by_time(case, batches))


def _placements_by_rule(case: Case, batches: Sequence[Groups]) -> dict[str, ModulePlacement]:
    typical = typical_lengths(case.model, [group for groups in batches for group in groups])
    return modality_placements(case.model, case.costs, case.num_ranks, typical)


def searched_system(
    name: str, case: Case, layout: Layout, method: str = "default", costs: EmulatedCosts | None = None
) -> System:
    """A system that searches order and strategies for every iteration."""

    def run(groups: Groups, budget: StoppingRule, seed: int) -> SystemTimeline:
        graph = graph_of(case, layout, groups, name, costs)
        found = solve(graph, budget=budget, seed=seed, method=method)
        return SystemTimeline(
            name,
            layout,
            graph,
            found.schedule,
            found.timeline,
            found.lower_bound,
            replica_seconds(case, layout),
        )

    return System(name, layout, run)


def replica_seconds(case: Case, layout: Layout) -> float:
    """Seconds to add up the gradients of replicated modules over the pipeline, after the last backward."""
    num_bytes = {
        m.name: sum(layer.num_parameters for layer in m.flat_layers) * GRADIENT_BYTES // case.degrees.tensor
        for m in case.model.modules
    }
    return ring_seconds(layout, num_bytes, case.costs)


def ring_seconds(layout: Layout, gradient_bytes: Mapping[str, int], costs: CostModel) -> float:
    """Seconds in which a ring of all pipeline ranks adds up the gradients of replicated modules.

    Parameters
    ----------
    gradient_bytes : mapping
        Of every module, on one rank.
    """
    total = sum(gradient_bytes[m.name] for m in layout.modules if m.on_ranks == "replicated" and not m.frozen)
    if not total or layout.num_ranks == 1:
        return 0.0
    return 2 * (layout.num_ranks - 1) * costs.transfer_s(total // layout.num_ranks)


def unadaptive_system(name: str, case: Case, layout: Layout, method: str) -> System:
    """A system that searches orders only, under one setting of recomputation for all.

    The setting is the one under which first in, first out is fastest.
    """

    def run(groups: Groups, budget: StoppingRule, seed: int) -> SystemTimeline:
        graph = graph_of(case, layout, groups, name, case.levels)
        best: tuple[int, IntArray, Schedule] | None = None
        for level in levels_by_time(graph):
            choice = np.full(graph.num_pairs, level)
            single = graph.with_candidates(choice)
            try:
                plain = first_in_first_out(single)
            except InfeasibleError:
                continue
            makespan = simulate(single, plain).makespan_ns
            if best is None or makespan < best[0]:
                best = makespan, choice, plain
        if best is None:
            raise InfeasibleError(f"{name}: no setting of recomputation fits")
        _, choice, schedule = best
        single = graph.with_candidates(choice)
        if method != "first in, first out":
            schedule = solve(single, budget=budget, seed=seed, method=method).schedule
        chosen = Schedule(schedule.order, choice, name)
        return SystemTimeline(name, layout, graph, chosen, simulate(graph, chosen), lower_bound(graph))

    return System(name, layout, run)


def fixed_system(
    name: str, case: Case, layout: Layout, order: Order, recompute: Recompute = uniform_recomputation
) -> System:
    """A system with one order whatever the data, and recomputation of its own kind."""

    def run(groups: Groups, _budget: StoppingRule, _seed: int) -> SystemTimeline:
        graph = graph_of(case, layout, groups, name, case.levels)
        return recompute(name, layout, graph, order(graph))

    return System(name, layout, run)


def fsdp_time(case: Case, groups: Groups, num_devices: int) -> tuple[float, str]:
    """Seconds and memory strategy of FSDP2 with ZeRO-3 on the same devices and data, slowest replica first.

    Microbatches are dealt out in turn; the lightest strategy whose largest microbatch fits is taken.
    """
    degrees = Degrees(data=num_devices, zero=3)
    costs = EmulatedCosts(case.architecture, case.machine, degrees, LEVELS, split=False)
    wholes = [Chunk(m.name, (0, len(m.flat_layers) - 1), 0) for m in case.model.modules]
    layout = Layout(
        1, tuple(ModuleLayout(m.name, m.after, m.frozen) for m in case.model.modules), tuple(wholes)
    )
    packing = pack_groups(case, layout, groups)
    room = (
        case.capacity_bytes
        - sum(costs.static_bytes(c) for c in wholes)
        - workspace_bytes(costs, layout, packing)
    )
    rows = [
        [
            [costs.chunk_costs(c, part.workload) for part in parts]
            for c, parts in zip(wholes, m.parts, strict=True)
        ]
        for m in packing.microbatches
    ]
    steps = -(-len(rows) // num_devices)
    best = (float("inf"), "")
    for level, name in enumerate(LEVELS):
        if (
            max(sum(options[level].activation_bytes for column in row for options in column) for row in rows)
            > room
        ):
            continue
        passes = [
            [
                (sum(o[level].forward_s for o in column), sum(o[level].backward_s for o in column))
                for column in row
            ]
            for row in rows
        ]
        empty = [(0.0, 0.0)] * len(wholes)
        passes += [empty] * (steps * num_devices - len(passes))
        best = min(best, (fsdp_seconds([passes[r::num_devices] for r in range(num_devices)]), name))
    if not best[1]:
        raise InfeasibleError("FSDP: the largest microbatch does not fit on one device")
    return best


def mfu(case: Case, groups: Groups, seconds: float) -> float:
    """Share of all devices' peak that the model's products use in an iteration of ``seconds``, update included."""
    devices = case.degrees.tensor * case.degrees.pipeline * case.degrees.context
    peak = devices * case.machine.device.flops_per_s
    return model_flops(case, groups) / (peak * (seconds + case.update_s))


def _load(case: Case, batches: Sequence[Groups], balance: str) -> LayerLoad:
    loads = {"parameters": by_parameters, "time": by_time}
    if balance not in loads:
        raise InputError("balance", f"{balance!r} is none of {', '.join(loads)}")
    return loads[balance](case, batches)


def _fastest(options: Sequence[System], batches: Sequence[Groups]) -> System:
    """The one that is fastest on the first sampled iteration; the last where none fits."""
    best: tuple[float, System] = (float("inf"), options[-1])
    for option in options:
        try:
            total = option.run(batches[0], Evaluations(1), 0).timeline.makespan_ns
        except InfeasibleError:
            continue
        if total < best[0]:
            best = total, option
    return best[1]
