"""Stages of random models: reuse equals no reuse, exactly."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.emulator.build import Placement, layer_template, module_templates
from pipeloom.emulator.stage import Stage, runs_of
from pipeloom.emulator.static import static_bytes
from pipeloom.spec import STRATEGIES, Workload
from pipeloom.spec import architecture as a
from pipeloom.spec.parallelism import Degrees
from tests.emulator.cases import architectures, machine
from tests.emulator.expand import expand

workloads = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(lambda n: Workload(tuple(4 * k for k in n)))


@settings(deadline=None, max_examples=40)
@given(architectures(), st.sampled_from([1, 2, 4]), workloads, st.sampled_from(STRATEGIES), st.data())
def test_a_stage_equals_its_operators_written_out(architecture, tensor, work, strategy, data):
    placement = Placement(machine(), Degrees(tensor=tensor))
    module = architecture.modules[-1]
    layers = module_templates(architecture, module, placement)
    each = [data.draw(st.sampled_from([strategy, "keep"])) for _ in layers]
    stage = Stage(runs_of(layers, each))
    for part in stage.parts:
        flat, matrix = expand(stage, work, part), stage.matrix(work, part)
        for free, ready in (([0, 0, 0, 0], [0, 0]), ([5_000, 70_000_000, 0, 9], [10**6, 10**6])):
            reused = (matrix + np.array([*free, *ready])).max(axis=1)
            assert reused.tolist() == flat.run(free, ready)


def test_static_memory_by_hand():
    layer = a.ResidualLayer(hidden=32, mixers=(a.MLPMixer(inner=64),))

    def bytes_of(**degrees):
        d = Degrees(**degrees)
        return static_bytes([layer_template(layer, Placement(machine(), d))] * 3, d)

    count = 3 * 32 * 64 + 32
    assert bytes_of(zero=0) == 3 * count * 18
    assert bytes_of(data=4, zero=0) == 3 * count * 18
    assert bytes_of(data=4, zero=1) == 3 * count * (6 + 3)
    # Two layers at a time are whole, and the gradients of one of them: in bfloat16, and in float32 as they are reduced.
    assert bytes_of(data=4, zero=3) == round(3 * count * 18 / 4) + 2 * count * 2 + count * (2 + 4)
    assert bytes_of(tensor=2) == 3 * (count // 2 + 16) * 18  # the norm is on both
