"""Streams at run time: what autograd's graph looks like does not matter, and what is wrong is named."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from pipeloom.errors import ExecutionError, InputError
from pipeloom.packing import PackingSpec, pack
from pipeloom.runtime import (
    Emit,
    ExecutionOptions,
    Executor,
    MeasureOptions,
    Model,
    Module,
    ThreadHub,
    find_shapes,
    measure_layers,
)
from pipeloom.spec import Batch, Chunk, Layout, ModuleLayout, Sample
from pipeloom.taskgraph import build_graph
from tests.plan.cases import Case, RandomCosts, earliest, random_schedule
from tests.runtime.cases import Run, assert_equal_gradients, expected, run_threads, take_gradients, total_loss

WIDTH = 4


class Layer(nn.Module):
    def __init__(self, emits: Sequence[str] = (), takes: Sequence[str] = (), weight: float = 0.0) -> None:
        super().__init__()
        self.inner, self.emits, self.weight = nn.Linear(WIDTH, WIDTH).double(), emits, weight
        self.take = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH).double() for name in takes})

    def forward(self, x: Tensor, **streams: Tensor) -> Any:
        assert streams.keys() == set(self.take.keys())
        y = torch.tanh(self.inner(x))
        for name, take in self.take.items():
            y = y + take(streams[name])
        loss = self.weight * y.square().sum() if self.weight else None
        return Emit(y, dict.fromkeys(self.emits, x * y), loss) if self.emits or self.weight else y


def skipping(layers: Sequence[nn.Module] | None = None, shape: Any = ("tokens", WIDTH)) -> Model:
    """Layer 0 emits for layers 2 and 3, layer 1 for layer 3; two layers have losses."""
    torch.manual_seed(0)
    made = [Layer(["a"]), Layer(["b"], weight=0.1), Layer(takes=["a"]), Layer(takes=["a", "b"], weight=0.2)]
    module = Module(
        "lm",
        made if layers is None else layers,
        reads="sequence",
        hidden=("tokens", WIDTH),
        output=("tokens", WIDTH),
        inputs=lambda part: part.samples[0] if len(part.samples) == 1 else torch.cat(part.samples),
        emits={0: {"a": shape}, 1: {"b": ("tokens", WIDTH)}},
        takes={2: ["a"], 3: ["a", "b"]},
    )
    return Model([module], lambda output, part: output.sin().sum(), len)


SAMPLES = [torch.randn(n, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (3, 5, 2)]
BATCH = Batch(tuple(Sample(str(i), len(x)) for i, x in enumerate(SAMPLES)))


def run_of(model: Model, cuts: Sequence[tuple[int, int, int]], strategy: str, split: bool, budget: int = 5) -> Run:
    """Chunks by first and last layer and rank, all under one strategy."""
    num_ranks = 1 + max(rank for _, _, rank in cuts)
    layout = Layout(
        num_ranks, (ModuleLayout.of(model.spec.modules[0]),), tuple(Chunk("lm", (a, b), r) for a, b, r in cuts)
    )
    packing = pack(BATCH, model.spec, layout, PackingSpec(budget))
    graph = build_graph(layout, packing, RandomCosts(1, split, (strategy,)), backward="split" if split else "whole")
    schedule = random_schedule(random.Random(0), graph)
    case = Case(
        model.spec, layout, packing, graph, schedule, earliest(graph.with_candidates(schedule.candidate), schedule)
    )
    return Run(case, model, SAMPLES)  # type: ignore[arg-type]


CUTS: Mapping[str, Sequence[tuple[int, int, int]]] = {
    "one chunk": [(0, 3, 0)],
    "past a chunk": [(0, 0, 0), (1, 1, 1), (2, 2, 0), (3, 3, 1)],
    "both sides": [(0, 1, 0), (2, 3, 1)],
    "there and back": [(0, 2, 0), (3, 3, 1)],
}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("strategy", ["keep", "recompute", "selective", "offload", "mixed"])
@pytest.mark.parametrize("cuts", CUTS)
def test_gradients_and_losses_are_those_of_the_undivided_model(cuts: str, strategy: str, split: bool) -> None:
    model = skipping()
    model.num_targets(SAMPLES[0])
    run = run_of(model, CUTS[cuts], strategy, split)
    loss, wanted = expected(run)
    assert abs(total_loss(run_threads(run)) - loss) < 1e-12
    assert_equal_gradients(take_gradients(model), wanted, 1e-12)


def test_losses_of_layers_do_not_depend_on_the_packing() -> None:
    model = skipping()
    found = []
    for budget in (5, 8, 20):
        run = run_of(model, CUTS["both sides"], "keep", False, budget)
        found.append((total_loss(run_threads(run)), take_gradients(model)))
    for value, gradients in found[1:]:
        assert abs(value - found[0][0]) < 1e-12
        assert_equal_gradients(gradients, found[0][1], 1e-12)


class Silent(Layer):
    def forward(self, x: Tensor, **streams: Tensor) -> Any:
        return torch.tanh(self.inner(x))


class Vector(Layer):
    def forward(self, x: Tensor, **streams: Tensor) -> Any:
        return Emit(x, {"a": x}, x.sum(1))


LAYERS = [Layer(["b"]), Layer(takes=["a"]), Layer(takes=["a", "b"])]


@pytest.mark.parametrize(
    ("layers", "shape", "problem"),
    [
        ([Silent(["a"]), *LAYERS], ("tokens", WIDTH), "module 'lm', layer 0, emits no stream, declared are 'a'"),
        ([Layer(["a", "c"]), *LAYERS], ("tokens", WIDTH), "module 'lm', layer 0, emits 'a', 'c', declared are 'a'"),
        (None, ("tokens", 3), r"layer 0, emits 'a' of \(\d, 4\) torch.float64, declared is \(\d, 3\)"),
        ([Vector(["a"]), *LAYERS], ("tokens", WIDTH), r"emits a loss of shape \(\d,\)"),
    ],
)
def test_what_a_layer_emits_is_checked(layers: Any, shape: Any, problem: str) -> None:
    run = run_of(skipping(layers, shape), CUTS["both sides"], "keep", False)
    with pytest.raises(ExecutionError, match=problem):
        run_threads(run)


def test_measuring_checks_too() -> None:
    run = run_of(skipping(None, ("tokens", 3)), CUTS["one chunk"], "keep", False)
    with pytest.raises(InputError, match=r"module 'lm'.emits\[0\]: declares 'a' as \(\d, 3\).*emitted \(\d, 4\)"):
        measure_layers(run.model, run.case.packing, SAMPLES, options=MeasureOptions(repeats=1))


def test_layers_that_take_other_streams_are_of_other_kinds() -> None:
    kinds = [layer.kind for layer in skipping().spec.modules[0].flat_layers]
    assert kinds == ["Layer[20]->a", "Layer[20]->b", "Layer[40](a)", "Layer[60](a,b)"]
    run = run_of(skipping(), CUTS["one chunk"], "keep", False)
    rows = measure_layers(run.model, run.case.packing, SAMPLES, options=MeasureOptions(repeats=1, strategies=True))
    assert {row.kind for row in rows} == set(kinds)


def test_what_wraps_a_layer_finds_all_tensors_that_it_returns() -> None:
    x = torch.ones(2)
    emit = tree_map(lambda tensor: tensor + 1, Emit(x, {"a": x}, x.sum()))
    assert [tensor.tolist() for tensor in (emit.output, emit.streams["a"], emit.loss)] == [[2, 2], [2, 2], 3]
    assert tree_map(lambda tensor: tensor, Emit(x)).loss is None


def test_a_layout_with_other_streams_is_refused() -> None:
    model = skipping()
    layout = Layout(1, (ModuleLayout("lm"),), (Chunk("lm", (0, 3), 0),))
    with pytest.raises(InputError, match="has other streams than the model"):
        Executor(model, layout, 0, ThreadHub().transport(0))


@pytest.mark.parametrize("strategy", ["keep", "recompute"])
@pytest.mark.parametrize(("weights", "autocast"), [(torch.float32, torch.bfloat16), (torch.bfloat16, None)])
def test_streams_in_half_precision(strategy: str, weights: torch.dtype, autocast: Any) -> None:
    plain = skipping()
    for layer in plain.modules[0].layers:
        layer.to(weights)
    samples = [sample.to(weights) for sample in SAMPLES]
    (module,) = plain.modules
    bare = Module(
        "lm",
        module.layers,
        reads="sequence",
        inputs=module.inputs,
        takes=module.takes,
        emits={0: {"a": None}, 1: {"b": None}},
    )
    model = find_shapes(
        Model([bare], lambda output, part: output.float().sum(), len), samples, BATCH.samples, autocast=autocast
    )
    found = []
    options = ExecutionOptions(autocast=autocast)
    for cuts, chosen in (([(0, 3, 0)], "keep"), ([(0, 1, 0), (2, 3, 0)], strategy)):
        case = run_of(model, cuts, chosen, False).case
        executor = Executor(model, case.layout, 0, ThreadHub().transport(0), options=options)
        result = executor.run(case.plan, case.packing, samples)
        found.append((result.loss_sum, take_gradients(model)))
    (whole, wanted), (parts, gradients) = found
    assert parts == pytest.approx(whole, rel=1e-2)
    assert all(gradient is not None for gradient in gradients.values())
    assert_equal_gradients(gradients, wanted, 2e-2)
