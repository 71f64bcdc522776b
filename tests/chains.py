"""Uniform pipelines, whose best schedules are known by hand."""

from __future__ import annotations

from pipeloom.cost.layers import LayerCost, LayerTable
from pipeloom.layout.cooptimize import LayerChain, chain_of_layers
from pipeloom.taskgraph import Candidate, Edges, PairLabel, Pairs, TaskGraph, Tasks, make_graph


def uniform_chain(
    num_ranks: int,
    num_microbatches: int,
    *,
    forward_ns: int = 1,
    backward_ns: int = 2,
    chunks_per_rank: int = 1,
    delay_ns: int = 0,
    activation_bytes: int = 1,
    capacity_bytes: int | None = None,
    candidates: bool = False,
    split: bool = False,
) -> TaskGraph:
    """A chain of ``num_ranks * chunks_per_rank`` chunks, dealt to the ranks in turn; the same cost everywhere.

    With ``split``, the backward's time is shared by I and W (I gets the odd nanosecond).
    """
    num_chunks = num_ranks * chunks_per_rank
    kind, rank, duration, pair, pass_id, microbatch, edges, labels = [], [], [], [], [], [], [], []
    next_segment = 0
    for m in range(num_microbatches):
        base = m * num_chunks
        for backwards in (0, 1, 2) if split else (0, 1):
            places = range(num_chunks) if backwards == 0 else reversed(range(num_chunks))
            for position, chunk in enumerate(places):
                if position % num_ranks == 0:
                    next_segment += 1
                weight = backward_ns // 2 if split else 0
                kind.append((0, 2, 3)[backwards] if split else backwards)
                rank.append(chunk % num_ranks)
                duration.append((forward_ns, backward_ns - weight, weight)[backwards])
                pair.append(base + chunk)
                pass_id.append(next_segment - 1)
                microbatch.append(m)
                task = len(kind) - 1
                if position and backwards < 2:
                    edges.append((task - 1, task, delay_ns if num_ranks > 1 else 0))
        labels += [PairLabel(chunk, m, 0) for chunk in range(num_chunks)]
    sources, targets, delays = zip(*edges, strict=True) if edges else ((), (), ())
    options = (
        Candidate("keep", forward_ns, backward_ns, 0, activation_bytes, activation_bytes),
        Candidate("recompute", forward_ns, forward_ns + backward_ns, 0, activation_bytes // 4, activation_bytes // 4),
    )
    return make_graph(
        name="uniform",
        num_ranks=num_ranks,
        tasks=Tasks(
            kind=kind,
            rank=rank,
            duration_ns=duration,
            pair=pair,
            pass_id=pass_id,
            microbatch=microbatch,
            module=[0] * len(kind),
            module_names=("lm",),
        ),
        pairs=Pairs(
            activation_bytes=[activation_bytes] * len(labels),
            weight_gradient_bytes=None,
            candidates=(options,) * len(labels) if candidates else None,
            labels=tuple(labels),
        ),
        edges=Edges(source=sources, target=targets, delay_ns=delays),
        capacity_bytes=None if capacity_bytes is None else [capacity_bytes] * num_ranks,
    )


def uniform_layers(
    num_layers: int, p: int, m: int, f: int = 1, b: int = 1, w: int = 1, split: bool = True
) -> LayerChain:
    """Times in ns, one byte a layer and microbatch."""
    layer = LayerCost("layer", f * 1e-9, 1, 0, backward_input_s=b * 1e-9, backward_weight_s=w * 1e-9)
    return chain_of_layers(LayerTable("uniform", p, m, 0.0, 0, (layer,) * num_layers), split=split)
