"""One adapter in single precision, under autocast and with bfloat16 weights: gradients are exact to the rounding."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from pipeloom.runtime import Model, find_shapes, run_undivided
from tests.runtime.cases import Gradients, run_threads, take_gradients, total_loss
from tests.runtime.test_streams import BATCH, CUTS, SAMPLES, run_of, skipping

BF16 = torch.bfloat16


def adapter(dtype: torch.dtype) -> Model:
    """Streams, losses of layers and no stated shape; what comes in takes the precision of the weights."""
    model = skipping()
    (module,) = model.modules
    layers = [layer.to(dtype) for layer in module.layers]
    emits = {0: {"a": None}, 1: {"b": None}}
    inputs = module.inputs
    assert inputs is not None
    given: Callable[..., torch.Tensor] = lambda part: inputs(part).to(dtype)  # type: ignore[union-attr]  # noqa: E731
    bare = replace(module, layers=layers, hidden=None, output=None, emits=emits, inputs=given)
    return replace(model, modules=[bare], loss=lambda output, part: output.float().sin().sum())


def exact() -> tuple[float, Gradients]:
    model = skipping()
    return run_undivided(model, BATCH, SAMPLES), take_gradients(model)


def error(found: Gradients, wanted: Gradients) -> float:
    """Of the whole gradient, as a share of it."""
    pairs = [(found[name], want) for name, want in wanted.items() if want is not None]
    difference = sum(float((have.double() - want).square().sum()) for have, want in pairs if have is not None)
    return float((difference / sum(float(want.square().sum()) for _, want in pairs)) ** 0.5)


@pytest.mark.parametrize("strategy", ["keep", "recompute", "selective"])
@pytest.mark.parametrize(
    ("dtype", "autocast", "rounding"),
    [(torch.float32, None, 1e-6), (torch.float32, BF16, 2e-2), (BF16, None, 2e-2)],
    ids=["fp32", "autocast", "bf16"],
)
def test_gradients_are_exact_to_the_rounding(
    dtype: torch.dtype, autocast: torch.dtype | None, rounding: float, strategy: str
) -> None:
    loss, wanted = exact()
    model = find_shapes(adapter(dtype), SAMPLES, BATCH.samples, autocast=autocast)
    declared = {layer.output.dtype for layer in model.spec.modules[0].flat_layers}
    assert declared == {"bfloat16" if BF16 in (dtype, autocast) else "float32"}
    region = nullcontext() if autocast is None else torch.autocast("cpu", autocast)
    with region:
        run_undivided(model, BATCH, SAMPLES)
    alone = error(take_gradients(model), wanted)
    run = run_of(model, CUTS["past a chunk"], strategy, False)
    assert total_loss(run_threads(run, autocast=autocast)) == pytest.approx(loss, rel=rounding)
    divided = error(take_gradients(model), wanted)
    assert divided < rounding
    # Sums over microbatches are rounded too.
    assert divided < 2 * alone + 1e-7
