"""Estimate the costs of a torchtitan model's parts from their weights, and split the model by them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from pipeloom.errors import InputError
from pipeloom.integrations.torchtitan.parts import VISION, can_be_cut, is_other, other_parts
from pipeloom.layout.layouts import partition_chain

Costs = Mapping[str, float]
"""Cost of each part of the model, by name (``"layers.3"``, ``"vision_encoder.layers.0"``), in any one unit."""


def estimated_costs(model: Any, seq_len: int, vision_tokens: float = 1.0) -> dict[str, float]:
    """Estimate the FLOPs of a forward per token of the sequence, by part, in the order in which parts run.

    They are two per weight of a matrix, for experts only those that a token is routed to, and those of attention over
    the sequence, whose width is the smallest output width of the layer's attention. Other modules, such as the adapter
    of an encoder, are parts if they have matrices. They count per patch if there is an encoder.

    Parameters
    ----------
    model : torch.nn.Module
        The model, which may be on the ``meta`` device.
    seq_len : int
        Tokens of the sequence.
    vision_tokens : float
        Patches per token of the sequence.
    """
    costs: dict[str, float] = {}
    encoder = getattr(model, VISION, None)
    if encoder is not None and not can_be_cut(encoder):
        costs[VISION] = vision_tokens * _operations(encoder)
    elif encoder is not None:
        ends = sum(_operations(child) for name, child in encoder.named_children() if name != "layers")
        layers = {name: _operations(layer) for name, layer in encoder.layers.items()}
        for name, operations in layers.items():
            costs[f"{VISION}.layers.{name}"] = vision_tokens * (operations + ends / len(layers))
    for name in other_parts(model):
        if operations := _operations(model.get_submodule(name)):
            costs[name] = operations * (1.0 if encoder is None else vision_tokens)
    costs["tok_embeddings"] = 0.0
    for name, layer in model.layers.items():
        costs[f"layers.{name}"] = _operations(layer) + _attention(layer, seq_len)
    costs["norm"] = 0.0
    costs["lm_head"] = _operations(model.lm_head)
    return costs


def _operations(module: Any) -> float:
    """Return the FLOPs of matrices per token: two per weight, and a share of those of experts."""
    total = 0.0
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            continue
        share = 1.0
        num_experts = getattr(part, "num_experts", None)
        if num_experts:
            top_k = [each.top_k for each in module.modules() if isinstance(getattr(each, "top_k", None), int)]
            share = float(next(iter(top_k), 1)) / num_experts
        for weight in part.parameters(recurse=False):
            if weight.dim() >= 2:
                total += 2.0 * weight.numel() * (share if weight.dim() == 3 else 1.0)
    return total


def _attention(layer: Any, seq_len: int) -> float:
    """Return the FLOPs per token of attention scores and weighted sums over half of a sequence."""
    attention = getattr(layer, "attention", None) or getattr(layer, "attn", None)
    if attention is None:
        return 0.0
    widths = [weight.shape[0] for weight in attention.parameters() if weight.dim() == 2]
    return 2.0 * seq_len * min(widths, default=0)


def completed(known: Costs, estimated: Costs) -> dict[str, float]:
    """Return the costs of all parts, in their order. Unknown ones are estimated in the unit of the known ones."""
    for name in known:
        if name not in estimated:
            raise InputError(f"costs[{name!r}]", "is not a part of the model", f"its parts are {', '.join(estimated)}")
    base = sum(estimated[name] for name in known)
    unit = sum(known.values()) / base if base else 1.0
    return {name: known.get(name, unit * operations) for name, operations in estimated.items()}


def split_by_costs(costs: Costs, num_stages: int) -> list[list[str]]:
    """Split parts, in their order, into stages so that the most expensive stage is as cheap as possible.

    Raises
    ------
    InputError
        When there are fewer parts than stages.
    """
    groups = _groups(costs, ("tok_embeddings",))
    if len(groups) < num_stages:
        groups = _groups(costs)
    if len(groups) < num_stages:
        raise InputError(
            "pipeline_parallel_degree",
            f"asks for {num_stages} stages, the model has {len(groups)} parts to split",
            "use fewer stages",
        )
    loads = [sum(costs[name] for name in group) for group in groups]
    cuts = partition_chain(loads, num_stages)
    return [[name for group in groups[first : last + 1] for name in group] for first, last in cuts]


def _groups(names: Iterable[str], without_cost: Collection[str] = ()) -> list[list[str]]:
    """Return the parts, in their order, by groups that stay in one stage.

    Parts ``without_cost`` join the next one, since a stage of their own would be empty.
    """
    groups: list[list[str]] = []
    names = list(names)
    in_front = names[: names.index("tok_embeddings")] if "tok_embeddings" in names else []
    for name in names:
        previous = groups[-1] if groups else []
        last = previous[-1] if previous else ""
        # Encoders that are not cut, and other modules in front of the embedding, are in its stage.
        joins = last == VISION or last in without_cost or (last in in_front and is_other(last))
        if previous == ["norm"] or joins:
            previous.append(name)
        else:
            groups.append([name])
    return groups
