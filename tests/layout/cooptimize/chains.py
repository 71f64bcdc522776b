"""Random chains of layers, placements and rules."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from pipeloom.cost.layers import LayerCost, LayerTable, StrategyEntry
from pipeloom.layout.cooptimize import LayerChain, PartitionPlacement, PriorityRule, chain_of_layers
from pipeloom.layout.cooptimize.layer_chain import chunk_costs, rank_static_bytes


def table(
    seed: int,
    num_layers: int,
    num_ranks: int,
    num_microbatches: int,
    *,
    split: bool = True,
    candidates: bool = False,
    boundary_s: float = 0.0,
) -> LayerTable:
    """Layers with times of 0 to 9 ms and bytes of 1 to 5, some with parts that are not known."""
    rng = np.random.default_rng(seed)
    layers = []
    for i in range(num_layers):
        f, b, w = (float(x) / 1e3 for x in rng.integers(0, 10, 3))
        size = int(rng.integers(1, 6))
        parts = {"backward_input_s": b, "backward_weight_s": w}
        if not split or rng.random() < 0.2:
            parts = {"backward_s": b + w}
        entries = None
        if candidates and rng.random() < 0.7:
            more = size // 2 + 1 if "backward_s" not in parts else None
            leaner = {k: v + (f if k != "backward_weight_s" else 0.0) for k, v in parts.items()}
            entries = (
                StrategyEntry("keep", f, size, **parts),
                StrategyEntry("full", f, size // 2, **leaner, weight_gradient_bytes=more),
            )
        layers.append(
            LayerCost(f"layer.{i}", f, size, 2, **parts, static_bytes=int(rng.integers(0, 4)), candidates=entries)
        )
    return LayerTable("random", num_ranks, num_microbatches, boundary_s, 0, tuple(layers))


@st.composite
def placed_chains(draw: st.DrawFn) -> tuple[LayerChain, PartitionPlacement, PriorityRule]:
    """A chain, a placement that fits one microbatch of each chunk, and a rule."""
    num_ranks = draw(st.integers(1, 4))
    num_layers = draw(st.integers(1, 10))
    m = draw(st.integers(1, 7))
    split, candidates = draw(st.booleans()), draw(st.booleans())
    delay = draw(st.sampled_from([0.0, 0.001, 0.004]))
    chain = chain_of_layers(
        table(
            draw(st.integers(0, 10**6)), num_layers, num_ranks, m, split=split, candidates=candidates, boundary_s=delay
        ),
        split=split,
    )
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    num = int(rng.integers(1, num_layers + 1))
    inner = sorted(int(x) for x in rng.choice(np.arange(1, num_layers), num - 1, replace=False))
    chosen = tuple(int(rng.integers(len(row))) for row in chain.strategies)
    placement = PartitionPlacement(
        (0, *inner, num_layers), tuple(int(r) for r in rng.integers(0, num_ranks, num)), chosen if any(chosen) else ()
    )
    if draw(st.booleans()):
        costs = chunk_costs(chain, placement)
        need = rank_static_bytes(chain, placement)
        most = np.maximum(costs.activation_bytes, costs.gradient_bytes)
        np.add.at(need, np.array(placement.ranks), most)
        chain = chain.with_capacity(need + int(rng.integers(0, 12)))
    step = 10_000_000
    rule = PriorityRule(
        rng.integers(-3 * step, 10 * step, (3, num)),
        rng.integers(0, step, (3, num)) * (rng.random((3, num)) < draw(st.sampled_from([0.0, 0.5]))),
        int(rng.integers(1, m + 2)),
        rng.integers(1, m + 1, num) if draw(st.booleans()) else None,
        draw(st.sampled_from([0, 16, 40])),
    )
    return chain, placement, rule
