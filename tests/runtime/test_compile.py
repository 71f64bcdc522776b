from __future__ import annotations

import pytest
import torch

from pipeloom.plan import Verb

from .cases import assert_equal_gradients, take_gradients
from .test_counts import Counted, action


# Torch's compiler warns of itself.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("strategy", "backward"),
    [
        ("keep", ("I", "W")),
        pytest.param("recompute", ("I", "W"), marks=pytest.mark.soak),
        pytest.param("offload", ("B",), marks=pytest.mark.soak),
    ],
)
def test_compiled_layers_give_the_same_gradients(strategy: str, backward: tuple[str, ...]) -> None:
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        counted = Counted()
        if compiled:
            for layer in counted.layers:
                layer.compile(backend="aot_eager", dynamic=True)
        actions = []
        for microbatch in range(2):
            for chunk in (0, 1):
                actions.append(action("F", chunk, microbatch, strategy))
                actions += [action(Verb.OFFLOAD, chunk, microbatch)] * (strategy == "offload")
            for chunk in (1, 0):
                actions += [action(Verb.LOAD, chunk, microbatch)] * (strategy == "offload")
                actions += [action(verb, chunk, microbatch) for verb in backward]
        with torch._functorch.config.patch(donated_buffer=False):
            counted.run_plainly(actions)
        found.append(take_gradients(counted.model))
    assert_equal_gradients(*found)
