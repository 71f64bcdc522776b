"""Time and memory of recomputing single modules of a layer, from the operators that the emulator traced.

Layers hold what their backward reads. Megatron drops the outputs of a recomputed module and runs its operators again in
the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipeloom.emulator.program import kept_tensors
from pipeloom.emulator.rules import RuleTable
from pipeloom.emulator.stage import Stage, runs_of
from pipeloom.emulator.tape import COMPUTE, Record, Tensor
from pipeloom.emulator.template import LayerTemplate
from pipeloom.errors import InputError
from pipeloom.integrations.megatron.model import Block, products
from pipeloom.spec import Workload
from pipeloom.spec.trainer import EXPERT_LAYER_LAUNCHES, LAYER_LAUNCHES

_ATTENTION = ("attention", "causal_attention")
_LATENT = 2
"""Inputs of latent attention's core: queries, and keys with values."""


class Saving(NamedTuple):
    """Time and launches that recomputation adds to a backward, and bytes that it frees between the passes."""

    more_ps: int = 0
    bytes: int = 0
    launches: float = 0

    def and_(self, other: Saving) -> Saving:
        """Return the sum of two savings."""
        return Saving(self.more_ps + other.more_ps, self.bytes + other.bytes, self.launches + other.launches)


def layer_saving(
    attention: LayerTemplate | None, feed_forward: LayerTemplate | None, modules: Sequence[str], workload: Workload
) -> Saving:
    """Return the cost and the saved memory of recomputing modules of a layer in one microbatch.

    The layer is given by its halves; one of a hybrid model has one of them. Modules that it lacks cost nothing, nor do
    ``shared_experts``, which the emulator does not separate.
    """
    found, whole, routed = Saving(), False, False
    if feed_forward is not None:
        routed = any(record.forward.kind == "route" for record in feed_forward.tape.records)
        whole = ("moe" if routed else "mlp") in modules
        if whole:
            keep, again = (Stage(runs_of([feed_forward], how)).cost(workload, ("B",)) for how in ("keep", "recompute"))
            more = again.duration_ps["B"] - keep.duration_ps["B"]
            freed = keep.activation_bytes - again.activation_bytes
            found = found.and_(Saving(more, freed, _launches(feed_forward, attention, routed=routed)))
        elif "moe_act" in modules and routed:
            found = found.and_(_expert_activations(feed_forward, workload))
    core = [] if attention is None else _core(attention)
    if "layernorm" in modules:
        # Transformer Engine fuses other norms into the linear layer behind them, which holds what they give.
        latent = attention if core and len(core[0].inputs) == _LATENT else None
        for half in (latent, feed_forward if routed and not whole else None):
            if half is not None:
                found = found.and_(_dropped_with_casts(half, half.tape.records[0], workload))
    if attention is None or not core:
        return found
    if "core_attn" in modules:
        found = found.and_(_core_attention(attention, core, workload))
    inputs = core[0].inputs
    if "mla_up_proj" in modules and len(inputs) == _LATENT:
        found = found.and_(_dropped(attention, _up_to_products(inputs), inputs, workload))
    return found


def traced_saving(layer: LayerTemplate, modules: Sequence[str], workload: Workload) -> Saving:
    """Return the same of a traced layer, whose halves are unknown; raises `InputError` for a module that is a half."""
    halves = {"moe", "mlp", "mla_up_proj"} & set(modules)
    if halves:
        raise InputError(f"recomputation of {min(halves)}", "is not known for a traced layer")
    found, records = Saving(), layer.tape.records
    if "layernorm" in modules:
        width = records[0].inputs[0].width
        for record in records:
            if record.forward.kind == "norm" and record.outputs[0].width == width:
                found = found.and_(_dropped_with_casts(layer, record, workload))
    if "moe_act" in modules:
        found = found.and_(_expert_activations(layer, workload))
    core = _core(layer)
    return found.and_(_core_attention(layer, core, workload)) if "core_attn" in modules and core else found


def _launches(half: LayerTemplate, other: LayerTemplate | None, *, routed: bool) -> float:
    """Return the launches of the forward of a half of a layer: those of the layer by the number of its operators."""
    whole = EXPERT_LAYER_LAUNCHES if routed else LAYER_LAUNCHES
    mine = len(half.tape.records)
    return whole / 3 * mine / (mine + (0 if other is None else len(other.tape.records)))


def _expert_activations(half: LayerTemplate, workload: Workload) -> Saving:
    """Return the saving of the activation between the products of routed experts, and of the clamp before it.

    A fused kernel of the experts has no activation of its own.
    """
    records = half.tape.records
    ends = [i for i, record in enumerate(records) if record.forward.kind == "grouped_matmul"]
    found = Saving()
    for record in records[ends[0] : ends[-1]] if ends else ():
        if record.forward.kind in ("clamp", "activation"):
            found = found.and_(_dropped_with_casts(half, record, workload))
    return found


def operator_saving(
    block: Block, attention: LayerTemplate | None, feed_forward: LayerTemplate | None, workload: Workload
) -> Saving:
    """Return the saving of torch's selective checkpointing by operator, as torchtitan configures it.

    Results of every second product are kept, from the first, and those of attention and of collectives. All other
    operators run again up to the last product. Raises `InputError` for a block with latent attention or experts, whose
    products are not counted here.
    """
    groups = products(block)
    if len(groups) < 4 or attention is None or feed_forward is None:
        raise InputError("recomputation by operator", "is known for dense blocks without latent attention alone")
    again = _shares_again(groups)
    more, stored, operators, number = 0, 0.0, 0.0, 0
    for half in (attention, feed_forward):
        records = half.tape.records
        number += len(records)
        ends = max(i for i, record in enumerate(records) if record.forward.kind == "matmul")
        for i, record in enumerate(records):
            kind, size = record.forward.kind, sum(tensor.num_bytes.of(workload) for tensor in record.outputs)
            if kind in _ATTENTION:
                stored += size
            elif kind == "matmul":
                share = again.pop(0)
                stored += size * (1 - share)
                more, operators = more + round(_forward_ps(half, [record], workload) * share), operators + share
            elif record.forward.device == COMPUTE and (i < ends or half is attention):
                more, operators = more + _forward_ps(half, [record], workload), operators + 1
    kept = sum(tensor.num_bytes.of(workload) for half in (attention, feed_forward) for tensor in _kept(half))
    entry = attention.tape.records[0].inputs[0].num_bytes.of(workload)
    return Saving(more, round(kept - stored - entry), LAYER_LAUNCHES / 3 * operators / number)


def _shares_again(groups: Sequence[Sequence[tuple[int, int]]]) -> list[float]:
    """Return the share of each fused product that every second product is. Nothing needs the result of the last."""
    number, shares = 0, []
    for group in groups:
        work = again = 0
        for width, out in group:
            number += 1
            work += width * out
            again += width * out * (number % 2 == 0)
        shares.append(again / work)
    if number % 2 == 0:
        shares[-1] = 0.0
    return shares


def _core(attention: LayerTemplate) -> list[Record]:
    """Return the operators of core attention: one, or two products and the softmax between them; none without it."""
    records = attention.tape.records
    softmax = next((i for i, record in enumerate(records) if record.forward.kind == "softmax"), None)
    if softmax is not None:
        return records[softmax - 1 : softmax + 2]
    return [record for record in records if record.forward.kind in _ATTENTION][:1]


def _core_attention(attention: LayerTemplate, core: Sequence[Record], workload: Workload) -> Saving:
    """Return the saving of core attention. Its output is kept, since the projection behind it reads it."""
    inner = [tensor for record in core[:-1] for tensor in record.outputs]
    return _dropped(attention, core, (*inner, *core[-1].outputs[1:]), workload)


def _up_to_products(tensors: Sequence[Tensor]) -> list[Record]:
    """Return the operators that produce tensors, back to the matrix product of each."""
    found: list[Record] = []
    for tensor in tensors:
        record = tensor.producer
        while record is not None:
            found.append(record)
            record = None if record.forward.kind == "matmul" else record.inputs[0].producer
    return found


def _dropped_with_casts(half: LayerTemplate, record: Record, workload: Workload) -> Saving:
    """Return the saving if an operator runs again, with the casts of its result, of which products keep theirs."""
    casts = [each for each in half.tape.records if each.forward.kind == "cast" and each.inputs[0] in record.outputs]
    made = [tensor for each in (record, *casts) for tensor in each.outputs]
    return _dropped(half, [record, *casts], made, workload)


def _dropped(half: LayerTemplate, records: Sequence[Record], tensors: Sequence[Tensor], workload: Workload) -> Saving:
    """Return the saving if operators run again and tensors are not held."""
    kept = _kept(half)
    freed = sum(tensor.num_bytes.of(workload) for tensor in tensors if tensor in kept)
    return Saving(_forward_ps(half, records, workload), round(freed), len(records))


def _kept(half: LayerTemplate) -> list[Tensor]:
    return kept_tensors(half.tape, "keep")


def _forward_ps(half: LayerTemplate, records: Sequence[Record], workload: Workload) -> int:
    """Return the picoseconds in which operators of the forward run."""
    costs = [record.forward for record in records]
    table = RuleTable(
        half.devices,
        tuple(cost.rule for cost in costs),
        np.array([cost.device for cost in costs]),
        np.array([float(cost.steps) for cost in costs]),
        np.array([float(cost.pieces) for cost in costs]),
    )
    amounts = np.array([[size.of(workload) for size in (c.flops, c.memory, c.network)] for c in costs])
    return int(table.durations_ps(amounts).sum())
