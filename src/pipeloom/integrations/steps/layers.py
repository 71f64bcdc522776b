"""Stages whose layers have memory strategies of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from pipeloom.cost import LayerFit, Profile, StrategyFit
from pipeloom.cost.fits import Coefficients, aligned
from pipeloom.integrations.steps.running import MODULE
from pipeloom.spec import Chunk, LayerSpec, Layout, ModelSpec, ModuleSpec, TensorShape

_TOKENS = 2
"""Place of the coefficient of tokens."""
_WORD_BYTES = 4


class PlannedStages(NamedTuple):
    """A chain of stages as the planner sees it. A stage may have several layers."""

    model: ModelSpec
    layout: Layout
    profile: Profile


def divide_stages(stages: PlannedStages, num_layers: Sequence[int]) -> PlannedStages:
    """Divide stages into layers that cost the same, so that the planner chooses a memory strategy for each.

    What a stage holds under every strategy beside the inputs of its layers counts to its first layer. Under one
    strategy for all layers, a stage costs the same as before. ``num_layers`` has the number of layers of every stage;
    empty: 1 for all.
    """
    given, layout, profile = stages
    if max(num_layers, default=1) == 1:
        return stages
    layers: list[LayerSpec] = []
    chunks: list[Chunk] = []
    fits: dict[str, LayerFit] = {}
    for chunk, count, whole in zip(layout.chunks, num_layers, given.modules[-1].flat_layers, strict=True):
        kind, begin = whole.kind, len(layers)
        fit = profile.layers[f"{MODULE}/{kind}"]
        words = _input_words(fit, count)
        if words:
            inner, first = TensorShape(("tokens", words)), f"{kind}.first"
            fits[first], fits[kind] = _divided(fit, count, float(words * _WORD_BYTES))
            layers += [LayerSpec(first, inner), *[LayerSpec(kind, inner)] * (count - 2)]
        else:
            fits[kind] = fit
        layers.append(whole)
        chunks.append(Chunk(MODULE, (begin, len(layers) - 1), chunk.rank))
    model = ModelSpec(given.name, (ModuleSpec(MODULE, "sequence", tuple(layers)),))
    named = {f"{MODULE}/{kind}": fit for kind, fit in fits.items()}
    costs = msgspec.structs.replace(profile, layers=named, typical_s=dict.fromkeys(named, 1.0))
    return PlannedStages(model, msgspec.structs.replace(layout, chunks=tuple(chunks)), costs)


def _input_words(fit: LayerFit, count: int) -> int:
    """Return the size of a layer's input, in units of four bytes per token; 0 if the stage stays whole."""
    if count == 1 or fit.strategies is None:
        return 0
    # Whole recomputation holds the inputs of all layers.
    held = aligned([fit.strategies.given_bytes], 4)[0]
    return int(held[_TOKENS] / (count * _WORD_BYTES))


def _divided(fit: LayerFit, count: int, input_bytes: float) -> tuple[LayerFit, LayerFit]:
    """Return the costs of the first layer, and those of each other layer.

    ``input_bytes`` are those of a layer's input per token.
    """
    strategies = fit.strategies
    assert strategies is not None
    given = np.zeros(4)
    given[_TOKENS] = input_bytes
    beside = aligned([strategies.given_bytes], 4)[0] - count * given
    shared = {
        name: _share(getattr(strategies, name), count)
        for name in StrategyFit.__struct_fields__
        if name.endswith("_s") or name == "selective_bytes"
    }
    kept = _share(aligned([fit.activation_bytes], 4)[0] - beside, count)
    each = msgspec.structs.replace(strategies, **shared, given_bytes=tuple(given.tolist()))
    layer = LayerFit(
        _share(fit.forward_s, count),
        _share(fit.backward_s, count),
        kept,
        each,
        None if fit.recompute_s is None else _share(fit.recompute_s, count),
    )
    first = msgspec.structs.replace(
        layer,
        activation_bytes=tuple((beside + kept).tolist()),
        strategies=msgspec.structs.replace(each, given_bytes=tuple((beside + given).tolist())),
    )
    return first, layer


def _share(coefficients: Sequence[float], count: int) -> Coefficients:
    """Return the share of one of several equal layers."""
    return tuple((np.array(coefficients) / count).tolist())
