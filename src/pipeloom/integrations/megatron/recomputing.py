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
from pipeloom.emulator.tape import Record, Tensor
from pipeloom.emulator.template import LayerTemplate
from pipeloom.spec import Workload

_ATTENTION = ("attention", "causal_attention")


class Saving(NamedTuple):
    """Time that recomputation adds to a backward, and bytes that it frees between forward and backward."""

    more_ps: int = 0
    bytes: int = 0

    def and_(self, other: Saving) -> Saving:
        """Return the sum of two savings."""
        return Saving(self.more_ps + other.more_ps, self.bytes + other.bytes)


def layer_saving(
    attention: LayerTemplate, feed_forward: LayerTemplate, modules: Sequence[str], workload: Workload
) -> Saving:
    """Return the cost and the saved memory of recomputing modules of a layer.

    Parameters
    ----------
    attention, feed_forward : LayerTemplate
        The layer's halves.
    modules : sequence of str
        Megatron's names. Modules that the layer lacks cost nothing, nor do ``shared_experts``, which the emulator does
        not separate.
    workload : Workload
        One microbatch.
    """
    routed = any(record.forward.kind == "route" for record in feed_forward.tape.records)
    found = Saving()
    whole = ("moe" if routed else "mlp") in modules
    if whole:
        keep, again = (Stage(runs_of([feed_forward], how)).cost(workload, ("B",)) for how in ("keep", "recompute"))
        more = again.duration_ps["B"] - keep.duration_ps["B"]
        found = found.and_(Saving(more, keep.activation_bytes - again.activation_bytes))
    if "layernorm" in modules:
        for half in (attention,) if whole else (attention, feed_forward):
            found = found.and_(_dropped_with_casts(half, half.tape.records[0], workload))
    if "core_attn" in modules:
        found = found.and_(_core_attention(attention, workload))
    if "moe_act" in modules and routed and not whole:
        act = _first(feed_forward, ("activation",))
        found = found.and_(_dropped_with_casts(feed_forward, act, workload))
    inputs = _core(attention)[0].inputs
    if "mla_up_proj" in modules and len(inputs) == 2:
        found = found.and_(_dropped(attention, _up_to_products(inputs), inputs, workload))
    return found


def _core(attention: LayerTemplate) -> list[Record]:
    """Return the operators of core attention: one, or two products and the softmax between them."""
    records = attention.tape.records
    softmax = next((i for i, record in enumerate(records) if record.forward.kind == "softmax"), None)
    return [_first(attention, _ATTENTION)] if softmax is None else records[softmax - 1 : softmax + 2]


def _core_attention(attention: LayerTemplate, workload: Workload) -> Saving:
    """Return the saving of core attention. Its output is kept, since the projection behind it reads it."""
    core = _core(attention)
    inner = [tensor for record in core[:-1] for tensor in record.outputs]
    return _dropped(attention, core, (*inner, *core[-1].outputs[1:]), workload)


def _first(half: LayerTemplate, kinds: Sequence[str]) -> Record:
    return next(record for record in half.tape.records if record.forward.kind in kinds)


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
    costs = [record.forward for record in records]
    table = RuleTable(
        half.devices,
        tuple(cost.rule for cost in costs),
        np.array([cost.device for cost in costs]),
        np.array([float(cost.steps) for cost in costs]),
    )
    amounts = np.array([[size.of(workload) for size in (c.flops, c.memory, c.network)] for c in costs])
    kept = kept_tensors(half.tape, "keep")
    freed = sum(tensor.num_bytes.of(workload) for tensor in tensors if tensor in kept)
    return Saving(int(table.durations_ps(amounts).sum()), round(freed))
