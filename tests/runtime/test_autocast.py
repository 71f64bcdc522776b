"""Under autocast weights are cast once an iteration, whatever the plan, and nothing is lost or changed by that."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeloom.errors import InputError
from pipeloom.packing import PackingSpec, pack
from pipeloom.plan import Action, ExecutionPlan, Verb
from pipeloom.runtime import ExecutionOptions, Executor, Model, Module, StepResult, ThreadHub
from pipeloom.runtime.execute.memory import OffloadedTensors
from pipeloom.spec import Batch, Chunk, Layout, ModuleLayout, Sample, TensorShape

from .cases import Gradients, assert_equal_gradients, take_gradients

WIDTH, LENGTH, NUM_MICROBATCHES = 64, 3, 3
HALF = TensorShape(("tokens", WIDTH), "bfloat16")


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(torch.tanh(self.up(x)))
        return output


class WeightCasts(TorchDispatchMode):
    """Counts how often each weight is cast."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.names = {p.data_ptr(): f"{i}.{n}" for i, x in enumerate(layers) for n, p in x.named_parameters()}
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.names:
            self.counts[self.names[args[0].data_ptr()]] += 1
        return func(*args, **(kwargs or {}))


def build() -> tuple[list[nn.Module], list[Tensor]]:
    torch.manual_seed(0)
    return [Feed() for _ in range(4)], [torch.randn(LENGTH, WIDTH) for _ in range(NUM_MICROBATCHES)]


def run(strategy: str, backward: tuple[str, ...], times: int = 1) -> tuple[Gradients, StepResult, Counter[str]]:
    """Two chunks of two layers, all forwards before all backwards; weights are doubled between iterations."""
    layers, samples = build()
    module = Module("lm", layers, reads="sequence", hidden=HALF, output=HALF, inputs=lambda part: part.samples[0])
    model = Model([module], lambda output, part: output.float().sin().sum(), lambda sample: 1.0)
    layout = Layout(1, (ModuleLayout("lm"),), tuple(Chunk("lm", (2 * c, 2 * c + 1), 0) for c in (0, 1)))
    batch = Batch(tuple(Sample(str(i), LENGTH) for i in range(NUM_MICROBATCHES)))
    packing = pack(batch, model.spec, layout, PackingSpec(LENGTH))

    def act(verb: str, chunk: int, microbatch: int, word: str = "") -> Action:
        return Action(verb=Verb(verb), chunk=f"lm.{chunk}", microbatch=microbatch, strategy=word)

    actions: list[Action] = []
    for m in range(NUM_MICROBATCHES):
        for c in (0, 1):
            actions.append(act("F", c, m, strategy))
            actions += [act(Verb.OFFLOAD, c, m)] * (strategy == "offload")
    for m in range(NUM_MICROBATCHES):
        actions += [act(verb, c, m) for c in (1, 0) for verb in backward]
    plan = ExecutionPlan(1, 0, layout.digest, ((*actions, Action(verb=Verb.OPTIMIZER_STEP)),))
    executor = Executor(model, layout, 0, ThreadHub().transport(0), options=ExecutionOptions(autocast=torch.bfloat16))
    for time in range(times):
        if time:
            take_gradients(model)
            with torch.no_grad():
                for layer in layers:
                    for parameter in layer.parameters():
                        parameter.mul_(2)
        with WeightCasts(layers) as casts:
            result = executor.run(plan, packing, samples, normalizer=1.0)
    return take_gradients(model), result, casts.counts


def plain(factor: float = 1.0) -> Gradients:
    """The same without any runtime."""
    layers, samples = build()
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters():
                parameter.mul_(factor)
    for sample in samples:
        with torch.autocast("cpu", torch.bfloat16):
            x = sample
            for layer in layers:
                x = layer(x)
            loss = x.float().sin().sum()
        loss.backward()  # type: ignore[no-untyped-call]
    return {f"lm.{i}.{n}": p.grad for i, x in enumerate(layers) for n, p in x.named_parameters()}


@pytest.mark.parametrize("backward", [("B",), ("I", "W")])
@pytest.mark.parametrize("strategy", ["keep", "recompute", "selective", "offload", "keep,recompute"])
def test_weights_are_cast_once_for_all_that_save_them(strategy: str, backward: tuple[str, ...]) -> None:
    found, _, counts = run(strategy, backward)
    wanted = plain()
    assert all(gradient is not None and gradient.any() for gradient in wanted.values())
    assert_equal_gradients(found, wanted, 1e-6)
    words = strategy.split(",") if "," in strategy else [strategy] * 2
    # The first pass of what is recomputed saves nothing and casts for itself.
    passes = [1 + NUM_MICROBATCHES * (word in ("recompute", "selective")) for word in words]
    assert counts == {name: passes[int(name[0]) % 2] for name in counts}
    assert len(counts) == len(wanted)


def test_casts_do_not_outlive_the_iteration() -> None:
    found, _, counts = run("keep", ("B",), times=2)
    assert set(counts.values()) == {1}
    assert_equal_gradients(found, plain(2.0), 1e-6)


class InputCasts(TorchDispatchMode):
    """The most casts of anything but weights that were there when a further one was made."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.weights = {p.data_ptr() for layer in layers for p in layer.parameters()}
        self.made: list[weakref.ref[Tensor]] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() not in self.weights:
            if output.dtype == torch.bfloat16:
                self.made.append(weakref.ref(output))
            self.most = max(self.most, sum(made() is not None for made in self.made))
        return output


@pytest.mark.parametrize("backward", [("B",), ("I", "W")])
def test_casts_of_inputs_go_with_their_microbatch(backward: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Feed() for _ in range(2)]
    full = TensorShape(("tokens", WIDTH), "float32")

    class Residual(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = x + self.inner(x)
            return output

    module = Module(
        "lm",
        [Residual(layer) for layer in layers],
        reads="sequence",
        hidden=full,
        output=full,
        inputs=lambda part: part.samples[0],
    )
    model = Model([module], lambda output, part: output.sin().sum(), lambda sample: 1.0)
    layout = Layout(1, (ModuleLayout("lm"),), tuple(Chunk("lm", (c, c), 0) for c in (0, 1)))
    num = 6
    packing = pack(Batch(tuple(Sample(str(i), LENGTH) for i in range(num))), model.spec, layout, PackingSpec(LENGTH))
    order = [("F", 0), ("F", 1), *((verb, c) for c in (1, 0) for verb in backward)]
    actions = tuple(Action(verb=Verb(v), chunk=f"lm.{c}", microbatch=m) for m in range(num) for v, c in order)
    executor = Executor(model, layout, 0, ThreadHub().transport(0), options=ExecutionOptions(autocast=torch.bfloat16))
    with InputCasts(layers) as casts:
        executor.run(
            ExecutionPlan(1, 0, layout.digest, (actions,)),
            packing,
            [torch.randn(LENGTH, WIDTH) for _ in range(num)],
            normalizer=1.0,
        )
    assert len(casts.made) >= 2 * num
    # One microbatch is under way at a time: its two inputs, and what its own backward casts.
    assert casts.most <= 4


def test_casts_of_weights_are_not_offloaded() -> None:
    _, result, _ = run("offload", ("B",))
    # A layer's activations are some thousand bytes, its weights' casts four times as much.
    assert 0 < result.offloaded_bytes < NUM_MICROBATCHES * 4 * 6 * LENGTH * WIDTH * 4
    assert result.offloaded_bytes < 2 * WIDTH * WIDTH * 2 * 4


def test_casts_that_a_layer_makes_for_itself_are_offloaded() -> None:
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    for autocast, moved in ((False, WIDTH * WIDTH * 2), (True, 0)):
        saved = OffloadedTensors([weight], autocast)
        with saved.saving(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            cast = weight if autocast else weight.to(torch.bfloat16)
            (torch.ones(1, WIDTH, dtype=torch.bfloat16, requires_grad=True) * 2) @ cast
        saved.offload()
        assert saved.num_bytes == moved + WIDTH * 2


def test_autocast_around_the_caller_is_left_as_it_was() -> None:
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        run("keep", ("B",))
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16
        assert not torch.is_autocast_cache_enabled()


def test_a_dtype_that_needs_scaled_losses_is_refused() -> None:
    with pytest.raises(InputError, match=r"options.autocast: is torch.float16, and losses are not scaled"):
        ExecutionOptions(autocast=torch.float16)
