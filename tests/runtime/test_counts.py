"""Bytes really held and layers really run again, counted against what the plan says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeloom.cost import ProfileCosts, fit_profile
from pipeloom.packing import PackingSpec, pack
from pipeloom.plan import Action, ExecutionPlan, Verb
from pipeloom.runtime import Executor, MeasureOptions, Model, Module, StepResult, ThreadHub, measure_layers
from pipeloom.spec import Batch, Chunk, Layout, ModuleLayout, Sample
from pipeloom.taskgraph import build_graph

WIDTH, INNER, LENGTHS = 8, 20, (5, 3)
ITEM = 8
LAYERS_PER_CHUNK = 2


class Live(TorchDispatchMode):
    """Knows every storage that an operation made, and which of them still live."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    @property
    def num_bytes(self) -> int:
        return sum(size for reference, size in self.made.values() if not reference.expired())


class Feed(nn.Module):
    """Saves its input and its inner activation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.down(torch.tanh(self.up(x)))


class Counted:
    """One rank, two chunks of two layers, a microbatch for each of two samples; runs plans that say when to count."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.samples = [torch.randn(n, WIDTH, dtype=torch.float64) for n in LENGTHS]
        self.layers = [Feed().double() for _ in range(2 * LAYERS_PER_CHUNK)]
        module = Module(
            "lm",
            self.layers,
            reads="sequence",
            hidden=("tokens", WIDTH),
            output=("tokens", WIDTH),
            inputs=lambda part: part.samples[0],
            kinds=("feed", "feed", "feed", "last"),
        )
        self.model = Model([module], lambda output, part: output.sin().sum(), lambda sample: 1.0)
        chunks = tuple(Chunk("lm", (2 * c, 2 * c + 1), 0) for c in (0, 1))
        self.layout = Layout(1, (ModuleLayout("lm"),), chunks)
        batch = Batch(tuple(Sample(str(i), n) for i, n in enumerate(LENGTHS)))
        self.packing = pack(batch, self.model.spec, self.layout, PackingSpec(max(LENGTHS)))

    def run(self, actions: list[Action]) -> tuple[list[int], list[int], StepResult]:
        """Bytes held at every OPTIMIZER_STEP, how often each layer ran, and the result."""
        held: list[int] = []

        def count() -> None:
            held.append(live.num_bytes)

        # The first run makes torch import modules, which may keep the frames, and so the tensors, that called for them.
        with Live():
            self.run_plainly(actions, lambda: None)
        with Live() as live:
            result = self.run_plainly(actions, count)
        return held, [layer.calls for layer in self.layers], result

    def run_plainly(self, actions: list[Action], at_step: Callable[[], None] | None = None) -> StepResult:
        plan = ExecutionPlan(1, 0, self.layout.digest, (tuple(actions),))
        executor = Executor(self.model, self.layout, 0, ThreadHub().transport(0))
        for layer in self.layers:
            layer.calls = 0
            layer.zero_grad()
        return executor.run(plan, self.packing, self.samples, optimizer_step=at_step)


def action(verb: str, chunk: int, microbatch: int, strategy: str = "") -> Action:
    return Action(verb=Verb(verb), chunk=f"lm.{chunk}", microbatch=microbatch, strategy=strategy)


COUNT = Action(verb=Verb.OPTIMIZER_STEP)
SPLIT = (("F", (0, 1), "keep"), ("I", (1, 0), ""), ("W", (1, 0), ""))


@pytest.mark.parametrize("first", ["keep", "recompute"])
@pytest.mark.parametrize("second", ["keep", "recompute"])
def test_the_bytes_held_between_forward_and_backward_are_the_plans(first: str, second: str) -> None:
    counted = Counted()
    rows = measure_layers(counted.model, counted.packing, counted.samples, options=MeasureOptions(repeats=1))
    profile = fit_profile(rows, "here")
    costs = ProfileCosts(counted.model.spec, profile, strategies=("keep", "recompute"))
    graph = build_graph(counted.layout, counted.packing, costs)
    assert graph.candidates is not None
    assert graph.labels is not None
    chosen = (first, second)
    for microbatch in range(2):
        actions, planned = [], [0]
        for label, candidates in zip(graph.labels, graph.candidates, strict=True):
            if label.microbatch == microbatch:
                strategy = chosen[label.chunk]
                planned.append(next(c.activation_bytes for c in candidates if c.strategy == strategy))
                actions += [action("F", label.chunk, microbatch, strategy), COUNT]
        actions += [action("B", 1, microbatch), COUNT, action("B", 0, microbatch), COUNT]
        held, _, _ = counted.run(actions)
        sample = counted.samples[counted.packing.microbatches[microbatch].samples[0]]
        # The samples are the user's: planned with the layer that saves them, but made by no operation.
        data = sample.nbytes if first == "keep" else 0
        # What the first chunk hands over waits in the second one's place; the loss is a number that is kept.
        handed = sample.nbytes
        loss = ITEM
        gradients = sum(p.nbytes for layer in counted.layers[2:] for p in layer.parameters())
        assert held[0] == planned[1] - data + handed
        assert held[1] == planned[1] + planned[2] - data + 2 * loss
        assert held[2] == planned[1] - data + 2 * loss + handed + gradients
        assert held[3] == 2 * loss + 2 * gradients


@pytest.mark.parametrize("backward", [("B",), ("I", "W")])
@pytest.mark.parametrize(
    "strategy", ["keep", "recompute", "selective", "offload", "keep,recompute", "recompute,offload"]
)
def test_layers_run_again_exactly_where_the_plan_says(strategy: str, backward: tuple[str, ...]) -> None:
    counted = Counted()
    actions: list[Action] = []
    for microbatch in range(2):
        for chunk in (0, 1):
            actions.append(action("F", chunk, microbatch, strategy))
            if "offload" in strategy:
                actions.append(action(Verb.OFFLOAD, chunk, microbatch))
        for chunk in (1, 0):
            if "offload" in strategy:
                actions.append(action(Verb.LOAD, chunk, microbatch))
            if "recompute" in strategy or "selective" in strategy:
                actions.append(action(Verb.RECOMPUTE, chunk, microbatch))
            actions += [action(verb, chunk, microbatch) for verb in backward]
    _, calls, result = counted.run(actions)
    words = strategy.split(",") * (1 if "," in strategy else LAYERS_PER_CHUNK)
    again = [word in ("recompute", "selective") for word in words]
    assert calls == [2 * (1 + more) for more in again * 2]
    # The loss is a layer of the last block.
    assert result.num_recomputed == sum(calls) - 2 * len(calls) + 2 * again[-1]
    moved = 0
    for lengths in LENGTHS:
        for chunk in (0, 1):
            for number, word in enumerate(words):
                if word == "offload":
                    # The inner activation; inputs of a block stay, and are another layer's outputs inside one.
                    moved += lengths * INNER * ITEM
                    moved += lengths * WIDTH * ITEM * (number > 0 and words[number - 1] == "offload")
            # The loss saves the last output.
            moved += lengths * WIDTH * ITEM * (chunk == 1 and words[-1] == "offload")
    assert result.offloaded_bytes == moved


def test_after_an_offload_only_the_inputs_of_blocks_are_held() -> None:
    counted = Counted()
    held, _, _ = counted.run(
        [
            action("F", 0, 0, "offload"),
            COUNT,
            action(Verb.OFFLOAD, 0, 0),
            COUNT,
            action("F", 1, 0, "keep"),
            action("B", 1, 0),
            action(Verb.LOAD, 0, 0),
            action("B", 0, 0),
        ]
    )
    rows = LENGTHS[0] * ITEM
    handed = rows * WIDTH
    assert held[0] == handed + rows * (2 * INNER + WIDTH)
    # On this device the host's copies count too.
    assert held[1] == held[0]


def test_a_split_backward_holds_no_more_than_before_and_lets_go_at_its_end() -> None:
    forward, inputs, weights = ([action(verb, c, 0, word) for c in order] for verb, order, word in SPLIT)
    actions = [*forward, COUNT, *inputs, COUNT, *weights, COUNT]
    counted = Counted()
    held, _, _ = counted.run(actions)
    gradients = sum(p.nbytes for layer in counted.layers for p in layer.parameters())
    activations = sum(LENGTHS[0] * ITEM * (INNER + WIDTH * (number > 0)) for number in range(len(counted.layers)))
    assert held[0] == activations + LENGTHS[0] * ITEM * WIDTH + 2 * ITEM
    # Caught gradients: of each layer's output and of its inner activation.
    assert held[1] <= held[0] + len(counted.layers) * LENGTHS[0] * ITEM * (INNER + WIDTH)
    assert held[2] == gradients + 2 * ITEM
