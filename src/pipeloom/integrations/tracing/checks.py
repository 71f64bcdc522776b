"""Check that a traced layer, as the emulator runs it, has the operations and saved bytes of the library's own run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from pipeloom.emulator.build import count_parameters, layer_module
from pipeloom.emulator.program import kept_tensors
from pipeloom.emulator.rules import PRODUCTS
from pipeloom.emulator.tape import Context, Tape
from pipeloom.integrations.tracing.fitting import Features, TraceError
from pipeloom.integrations.tracing.fusion import Draft, Segment, backward_operations
from pipeloom.spec import Workload
from pipeloom.spec.architecture import Architecture, TracedLayer

_TOLERANCE = 0.01


def check_parameters(architecture: Architecture, model: nn.Module, tolerance: float = _TOLERANCE) -> None:
    """Raise `TraceError` if the modules do not have all parameters of the model.

    By default, one percent may differ: a head counts a norm and no biases, also if it has none or some.
    """
    found, wanted = count_parameters(architecture), sum(p.numel() for p in model.parameters())
    if abs(found - wanted) > tolerance * wanted:
        raise TraceError("model.parameters", f"are {wanted:,}, but {found:,} are found", "report the model")


def check_backward(where: str, drafts: Sequence[Draft], found: float | None, features: Features) -> None:
    """Raise `TraceError` if the backward that ran has other operations than the one that is emulated."""
    wanted = sum(map(backward_operations, drafts))
    if found is not None and abs(found - wanted) > _TOLERANCE * wanted:
        text = f"runs {found:,.0f} operations for lengths {features.text}, not {wanted:,.0f}"
        raise TraceError(f"backward of {where}", text)


def check_layer(
    where: str,
    layer: TracedLayer,
    features: Sequence[Features],
    segments: Sequence[Segment],
    drafts: Sequence[Sequence[Draft]],
) -> None:
    """Raise `TraceError` if operations or eager saved bytes of a size differ by more than one percent from what ran."""
    module, width = layer_module(layer)
    tape = Tape(Context(eager=True))
    module(tape.input(width))
    kept = kept_tensors(tape, "keep")
    products = [record.forward.flops for record in tape.records if record.forward.kind in PRODUCTS]
    # A loop over experts, or every token for every expert, keeps other tensors than a trainer does.
    own = any(each.fixed.get("own") for each in drafts[0])
    for size, segment, each in zip(features, segments, drafts, strict=True):
        work = Workload(size.lengths)
        operations = sum(map(_operations, each))
        _compare(f"{where}.operations", sum(flops.of(work) for flops in products), operations, size)
        if not own:
            _compare(f"{where}.saved_bytes", sum(t.num_bytes.of(work) for t in kept), saved_bytes(segment), size)


def _operations(each: Draft) -> float:
    """Return an operator's operations; those of convolutions are not among the ones that torch counts backward."""
    convolves = not each.operations and (each.kind == "product" or each.fixed.get("kind") == "matmul")
    return each.counts["flops"] if each.forward_only or convolves else each.operations


def saved_bytes(segment: Segment) -> float:
    """Return the bytes that autograd keeps of what ran, without parameters and what the caller holds."""
    made = {value for record in segment.records for value in record.writes}
    saved = {value for record in segment.kept for value in record.saved if value in made or value.differentiable}
    return float(sum(value.num_bytes for value in saved))


def _compare(where: str, found: float, wanted: float, size: Features) -> None:
    if abs(found - wanted) > _TOLERANCE * wanted:
        text = f"are {wanted:,.0f} in the library's run for lengths {size.text}, but {found:,.0f} are emulated"
        raise TraceError(where, text, "describe this layer in a .toml file, or report the model")
