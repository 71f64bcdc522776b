"""Layers are measured as training runs them: on its device, under its autocast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.packing import Microbatch, Packing, SubMicrobatch
from pipeloom.runtime import MeasureOptions, Model, Module, measure_layers
from pipeloom.spec import Batch, Sample, TensorShape, Workload

WIDTH, LENGTH = 64, 3
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        return output * scale.to(output.dtype)


def model(dtype: str) -> Model:
    shape = TensorShape(("tokens", WIDTH), dtype)
    module = Module(
        "lm",
        [Layer() for _ in range(3)],
        reads="sequence",
        hidden=shape,
        output=shape,
        inputs=lambda part: part.samples[0],
        context=lambda part: {"scale": torch.ones(1)},
        kinds=("first", "middle", "last"),
    )
    return Model([module], lambda output, part: output.float().square().sum(), lambda sample: 1.0)


def packing() -> Packing:
    part = SubMicrobatch(0, 1, Workload((LENGTH,)))
    return Packing(Batch((Sample("a", LENGTH),)), ("lm",), (Microbatch((0,), ((part,),)),))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strategies", [False, True])
def test_layers_are_measured_under_autocast(device: str, strategies: bool) -> None:
    torch.manual_seed(0)
    made, samples = model("bfloat16"), [torch.randn(LENGTH, WIDTH)]
    rows = measure_layers(
        made,
        packing(),
        samples,
        options=MeasureOptions(repeats=2, strategies=strategies, device=device, autocast=torch.bfloat16),
    )
    assert [row.kind for row in rows] == ["first", "middle", "last"]
    for row in rows:
        assert row.forward_s > 0
        assert row.backward_s > 0
        # What its product saves of the input in half precision; the weights' casts, 8192 bytes, are everybody's.
        assert LENGTH * WIDTH * 2 <= row.activation_bytes < 6 * LENGTH * WIDTH * 4
    for parameter in made.modules[0].layers[0].parameters():
        assert parameter.device.type == "cpu"
        assert parameter.grad is None
    with pytest.raises(InputError, match=r"declares .*bfloat16, layer 0 returned .*float32"):
        measure_layers(made, packing(), samples, options=MeasureOptions(repeats=1, device=device))


def test_nothing_of_a_measured_layer_is_kept_for_the_next_run() -> None:
    made, samples = model("bfloat16"), [torch.randn(LENGTH, WIDTH)]
    measure_layers(made, packing(), samples, options=MeasureOptions(repeats=1, autocast=torch.bfloat16))
    layer = made.modules[0].layers[0]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    with torch.autocast("cpu", torch.bfloat16):
        assert not layer(samples[0], scale=torch.ones(1)).any()
