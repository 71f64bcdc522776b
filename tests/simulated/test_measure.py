"""Layers on the simulated accelerator while they are measured, and afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeloom.layout import single_rank
from pipeloom.packing import PackingSpec, pack
from pipeloom.runtime import Model, Module
from pipeloom.runtime.measure.measure import MeasureOptions, measure_layers
from pipeloom.spec import Batch, Sample, TensorShape
from tests.runtime.one_rank import Feed

from . import device as sim

WIDTH, LENGTH, COUNT = 4, 3, 5


class Moving(Feed):
    """Notes where it is moved."""

    def __init__(self, moves: list[str]) -> None:
        super().__init__(WIDTH, 2 * WIDTH)
        self.moves = moves

    def _apply(self, *args: object, **kwargs: object) -> nn.Module:
        before = self.up.weight.device.type
        super()._apply(*args, **kwargs)
        if self.up.weight.device.type != before:
            self.moves.append(self.up.weight.device.type)
        return self


@pytest.mark.parametrize("home", ["cpu", sim.KIND])
def test_layers_return_to_where_they_were(home: str) -> None:
    moves: list[str] = []
    layers: list[nn.Module] = [Moving(moves).to(home) for _ in range(2)]
    moves.clear()
    shape = TensorShape(("tokens", WIDTH), "float32")

    def inputs(part: object) -> Tensor:
        return torch.ones(LENGTH, WIDTH)

    module = Module("lm", layers, reads="sequence", hidden=shape, output=shape, inputs=inputs)
    model = Model([module], lambda output, part: output.sum(), lambda sample: 1.0)
    batch = Batch(tuple(Sample(str(i), LENGTH) for i in range(COUNT)))
    packing = pack(batch, model.spec, single_rank(model.spec, {}), PackingSpec(LENGTH))
    assert len(packing.microbatches) == COUNT
    measure_layers(model, packing, [None] * COUNT, options=MeasureOptions(device=sim.KIND, repeats=1))
    assert moves == ([] if home == sim.KIND else [sim.KIND, "cpu"] * 2 * COUNT)
