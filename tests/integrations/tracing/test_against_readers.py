"""Traced models equal those that the hand-written readers give: parameters, operations, bytes and seconds."""

import pytest

from pipeloom.emulator import module_parameters
from pipeloom.emulator.build import Placement, module_templates
from pipeloom.integrations.tracing.architecture import trace_config
from pipeloom.spec import Workload
from pipeloom.spec.architecture import Architecture, ModuleArchitecture
from pipeloom.spec.catalog import load_cluster, load_trainer
from pipeloom.spec.parallelism import Degrees
from tests.integrations.hand_counted import architecture_of
from tests.integrations.tracing import models

ROWS = Workload((4096, 2048))


def costs(architecture: Architecture, module: ModuleArchitecture, tensor: int, trainer: str) -> dict[str, float]:
    """Sums over the layers of a module."""
    placement = Placement(load_cluster("h100-64"), Degrees(tensor=tensor), load_trainer(trainer))
    total = dict.fromkeys(("flops", "keep", "selective", "F", "B"), 0.0)
    for template in module_templates(architecture, module, placement):
        layer = template.on(ROWS)
        total["flops"] += layer.model_flops
        for strategy in ("keep", "selective"):
            total[strategy] += layer.activation_bytes[strategy]
        for part in "FB":
            if ("keep", part) in layer.leaves:
                total[part] += int(layer.leaves["keep", part].duration_ps.sum())
    return total


@pytest.mark.parametrize("trainer", ["fused", "torchtitan"])
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("name", ["LLAMA", "QWEN3_MOE", "VISION"])
def test_a_traced_model_costs_what_the_hand_counted_one_does(name: str, tensor: int, trainer: str) -> None:
    config = getattr(models, name)
    traced, read = trace_config(config, name), architecture_of(config, name)
    assert module_parameters(traced) == module_parameters(read)
    module = traced.modules[-1].name  # the language model
    found = costs(traced, traced.module(module), tensor, trainer)
    wanted = costs(read, read.module(module), tensor, trainer)
    assert found["flops"] == pytest.approx(wanted["flops"], rel=1e-9)
    for count in ("keep", "selective", "F", "B"):
        # What a router keeps depends on how it scales its weights, which readers do not say.
        assert found[count] == pytest.approx(wanted[count], rel=0.03), count


def test_streams_and_their_ends_are_found() -> None:
    traced, read = trace_config(models.VISION, ""), architecture_of(models.VISION, "")
    for one, other in zip(traced.modules, read.modules, strict=True):
        assert [end.layer for end in one.emits] == [end.layer for end in other.emits]
        assert [end.layer for end in one.takes] == [end.layer for end in other.takes]
    assert traced.module("vision").joined == 4
