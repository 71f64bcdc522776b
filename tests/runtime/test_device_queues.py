"""Waiting for a device, on marks that stand for a GPU's events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeloom.errors import ExecutionError
from pipeloom.packing import PackingSpec, pack
from pipeloom.plan import Action, ExecutionPlan, Verb
from pipeloom.runtime import ExecutionOptions, Executor, Model, Module, ThreadHub
from pipeloom.runtime.launch.device import DeviceQueues, StalledError, await_marks, moved
from pipeloom.spec import Batch, Chunk, Layout, ModuleLayout, Sample


class Mark:
    """Reached after it was looked at so often; None: never."""

    def __init__(self, looks: int | None = 0) -> None:
        self.left = looks

    def query(self) -> bool:
        if self.left is None:
            return False
        self.left -= 1
        return self.left < 0


def test_all_marks_are_waited_for() -> None:
    marks = [Mark(looks) for looks in (0, 3, 0, 5, 2)]
    await_marks(marks, 10.0)
    assert marks[-1].left is not None
    assert marks[-1].left < 0


def test_time_counts_from_mark_to_mark() -> None:
    # Each look takes a tenth of a millisecond at least: longer in all than the bound, but never between two marks.
    await_marks([Mark(looks) for looks in [40] * 20 + [900]], 0.5)


def test_the_first_mark_that_is_not_reached_is_named() -> None:
    for reached in range(4):
        marks = [Mark(1) for _ in range(reached)] + [Mark(None) for _ in range(4 - reached)]
        with pytest.raises(StalledError) as caught:
            await_marks(marks, 0.02)
        assert caught.value.num_reached == reached


def test_a_tensor_on_the_cpu_is_released_when_it_has_been_sent() -> None:
    queues = DeviceQueues(ThreadHub(timeout_s=0.05).transport(0), torch.device("cpu"))
    sent = queues.send(torch.ones(1), 1, 0)
    with pytest.raises(ExecutionError, match=r"no answer of rank 1"):
        queues.sent(sent, None, 1)


class StuckQueues(DeviceQueues):
    """A device that never ends its fourth action."""

    num_marks = 0

    def stamp(self) -> Any:
        self.num_marks += 1
        return Mark(0 if self.num_marks <= 4 else None)

    def times(self, stamps: Sequence[Any], timeout_s: float | None = None) -> Sequence[int]:
        await_marks(stamps, timeout_s)
        return [0] * len(stamps)


def two_microbatches() -> tuple[Model, Layout, ExecutionPlan, Any, list[Tensor]]:
    """One chunk of one layer, two samples of one token."""
    module = Module(
        "lm",
        [nn.Linear(2, 2)],
        reads="sequence",
        hidden=("tokens", 2),
        output=("tokens", 2),
        inputs=lambda part: part.samples[0],
    )
    model = Model([module], lambda output, part: output.square().sum(), lambda sample: 1.0)
    layout = Layout(1, (ModuleLayout("lm"),), (Chunk("lm", (0, 0), 0),))
    packing = pack(Batch((Sample("a", 1), Sample("b", 1))), model.spec, layout, PackingSpec(1))
    verbs = [("F", 0), ("F", 1), ("B", 0), ("B", 1)]
    actions = tuple(Action(verb=Verb(verb), chunk="lm.0", microbatch=m) for verb, m in verbs)
    plan = ExecutionPlan(1, 0, layout.digest, (actions,))
    return model, layout, plan, packing, [torch.ones(1, 2), torch.ones(1, 2)]


def test_an_iteration_that_hangs_names_the_action() -> None:
    model, layout, plan, packing, samples = two_microbatches()
    transport = ThreadHub().transport(0)
    executor = Executor(model, layout, 0, transport, options=ExecutionOptions(timeout_s=0.02))
    executor.queues = StuckQueues(transport, torch.device("cpu"))
    with pytest.raises(ExecutionError, match=r"rank 0, step 3, 'B lm.0 1.0': the device has made no progress for 0.02"):
        executor.run(plan, packing, samples)


def test_what_a_user_gives_is_moved_however_deep_it_lies() -> None:
    tensor = torch.ones(2)
    given = {"mask": tensor, "rope": (tensor, [tensor, {"cos": tensor}]), "causal": True, "name": "x", "none": None}
    there = moved(given, "meta")
    deep = [there["mask"], there["rope"][0], there["rope"][1][0], there["rope"][1][1]["cos"]]
    assert all(each.device.type == "meta" for each in deep)
    assert (there["causal"], there["name"], there["none"], type(there["rope"])) == (True, "x", None, tuple)
    assert tensor.device.type == "cpu"
