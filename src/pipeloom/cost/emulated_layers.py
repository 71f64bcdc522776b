"""Costs of single layers from the emulator: a model as a chain of layers to co-optimize."""

from __future__ import annotations

from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.cost.layers import LayerCost, LayerTable, StrategyEntry
from pipeloom.cost.model import StrategyCost
from pipeloom.errors import InputError, check_count
from pipeloom.spec import Chunk, Workload
from pipeloom.spec.architecture import Architecture
from pipeloom.spec.hardware import ClusterSpec
from pipeloom.spec.parallelism import Degrees


def emulated_layers(
    architecture: Architecture | str,
    cluster: ClusterSpec | str,
    degrees: Degrees,
    *,
    tokens: int,
    num_microbatches: int = 16,
    strategies: tuple[str, ...] = ("keep",),
) -> LayerTable:
    """Emulate each layer of a language model by itself on one microbatch.

    Parameters
    ----------
    architecture, cluster : specification or zoo name
    degrees : Degrees
        ``pipeline`` is the number of ranks.
    tokens : int
        Length of the sequence of a microbatch.
    strategies : tuple of str
        Candidates of every layer, the base first.

    Raises
    ------
    InputError
        If the model is not a single language module.
    """
    costs = EmulatedCosts(architecture, cluster, degrees, strategies)
    check_count("tokens", tokens)
    modules = costs.architecture.modules
    if len(modules) != 1:
        names = ", ".join(module.name for module in modules)
        raise InputError("model", f"has modules {names}", "arrange takes a chain: one language module")
    name = modules[0].name
    work = Workload((tokens,))
    kinds = [type(layer).__name__.removesuffix("Layer").lower() for layer in modules[0].flat_layers]
    layers = []
    for i, kind in enumerate(kinds):
        chunk = Chunk(name, (i, i), 0)
        options = costs.chunk_costs(chunk, work)
        base = options[0]
        layers.append(
            LayerCost(
                _name(kind, i),
                base.forward_s,
                base.activation_bytes,
                0,
                _whole_s(base),
                base.backward_input_s,
                base.backward_weight_s,
                static_bytes=costs.static_bytes(chunk),
                candidates=tuple(_entry(option) for option in options) if len(options) > 1 else None,
                update_s=costs.update_s((chunk,)),
            )
        )
    middle = Chunk(name, (len(kinds) // 2, len(kinds) // 2), 0)
    size = costs.boundary_bytes(middle, work)
    title = f"{costs.architecture.name}, {tokens} tokens, tp {degrees.tensor}"
    return LayerTable(title, degrees.pipeline, num_microbatches, costs.transfer_s(size), size, tuple(layers))


def _name(kind: str, number: int) -> str:
    if "embedding" in kind:
        return "embedding"
    return "head" if "head" in kind else f"layer.{number}"


def _whole_s(cost: StrategyCost) -> float | None:
    """Return the seconds of a backward that is not split."""
    return cost.backward_s if cost.backward_input_s is None else None


def _entry(cost: StrategyCost) -> StrategyEntry:
    return StrategyEntry(
        cost.strategy,
        cost.forward_s,
        cost.activation_bytes,
        _whole_s(cost),
        cost.backward_input_s,
        cost.backward_weight_s,
        cost.weight_gradient_bytes,
        host_bytes=cost.host_bytes,
    )
