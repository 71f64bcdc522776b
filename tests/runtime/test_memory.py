from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from pipeloom.errors import ExecutionError
from pipeloom.runtime.execute.blocks import ChunkActivation
from pipeloom.runtime.execute.memory import OffloadedTensors, _policy

CPU = torch.device("cpu")


class CountOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))


def forward(activation: ChunkActivation, layers: list[nn.Module], strategy: str, x: Tensor) -> Tensor:
    return activation.forward(layers, ((0, len(layers), strategy),), (x,), True)


@pytest.mark.parametrize(("strategy", "products", "gelus"), [("selective", 2, 4), ("recompute", 4, 4)])
def test_selective_recomputation_repeats_no_products(strategy: str, products: int, gelus: int) -> None:
    layers = [layer().double(), nn.GELU()]
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    activation = ChunkActivation(CPU, {})
    with CountOperations() as operations:
        output = forward(activation, layers, strategy, x)
        activation.recompute()
    assert operations.counts["addmm"] == products
    assert operations.counts["gelu"] == gelus
    assert activation.num_recomputed == 2
    activation.backward(torch.ones_like(output))
    wanted = torch.autograd.grad(nn.Sequential(*layers)(x).sum(), x)[0]
    torch.testing.assert_close(x.grad, wanted, rtol=1e-12, atol=1e-12)


class InPlace(nn.Module):
    """Changes results of products, or views of them, in place."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.first, self.second, self.view = nn.Linear(6, 6), nn.Linear(6, 6), view

    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        changed = out.view(-1, 3)[1:] if self.view else out
        changed.add_(1.0).mul_(2.0)
        return self.second(out).tanh_() * x


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("strategy", ["keep", "selective", "recompute", "offload"])
def test_layers_may_change_a_product_in_place(strategy: str, view: bool) -> None:
    torch.manual_seed(0)
    layers = [InPlace(view).double(), InPlace(view).double()]
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    weights = [p for each in layers for p in each.parameters()]
    wanted = torch.autograd.grad(nn.Sequential(*layers)(x).sum(), [x, *weights])
    activation = ChunkActivation(CPU, {})
    output = forward(activation, layers, strategy, x)
    activation.offload()
    activation.load()
    activation.backward(torch.ones_like(output))
    for leaf, gradient in zip([x, *weights], wanted, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("strategy", "saved"), [("keep", 3), ("recompute", 0)])
def test_recomputation_saves_nothing_in_the_forward(strategy: str, saved: int) -> None:
    count = []
    x = torch.randn(3, 6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (count.append(1), t)[1], lambda t: t):
        forward(ChunkActivation(CPU, {}), [nn.Tanh(), nn.Tanh(), nn.Tanh()], strategy, x)
    assert len(count) == saved


def test_offloaded_activations_leave_and_return() -> None:
    x = torch.randn(3, 6, requires_grad=True)
    activation = ChunkActivation(CPU, {})
    output = forward(activation, [nn.Tanh(), nn.Tanh(), nn.Tanh()], "offload", x)
    # Each layer saves its output.
    held = [weakref.ref(s.here) for b in activation.blocks if b.offloaded for s in b.offloaded._storages.values()]
    assert len(held) == 3
    activation.offload()
    assert activation.offloaded_bytes == 3 * 3 * 6 * 4
    assert all(reference() is None for reference in held)
    activation.load()
    activation.backward(torch.ones_like(output))
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.autograd.grad(x.tanh().tanh().tanh().sum(), x)[0])


def test_views_of_one_storage_travel_once_and_come_back_as_they_were() -> None:
    base = torch.arange(24.0).view(4, 6)
    store = OffloadedTensors([])
    saved = [store._pack(view) for view in (base, base.t(), base[1:3, ::2])]
    store.offload()
    assert store.num_bytes == 24 * 4
    wanted = [base.clone(), base.t().clone(), base[1:3, ::2].clone()]
    base.zero_()
    store.load()
    for one, want in zip(saved, wanted, strict=True):
        torch.testing.assert_close(store._unpack(one), want)
    assert store._unpack(saved[1]).stride() == (1, 6)


def test_what_stays_anyway_is_not_moved() -> None:
    weight = torch.randn(3)
    store = OffloadedTensors([weight])
    assert store._pack(weight) is weight
    store.offload()
    assert store.num_bytes == 0


def test_a_change_in_place_is_refused() -> None:
    tensor = torch.randn(3)
    store = OffloadedTensors([])
    store._pack(tensor)
    tensor.add_(1.0)
    with pytest.raises(ExecutionError, match="in place"):
        store.offload()


def test_the_output_is_not_held() -> None:
    x = torch.randn(3, 6, requires_grad=True)
    activation = ChunkActivation(CPU, {})
    output = forward(activation, [nn.Linear(6, 6)], "keep", x)
    base = weakref.ref(output)
    del output
    assert base() is None
    activation.backward(torch.ones(3, 6))
    assert x.grad is not None


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_with_dropout_is_recomputed_so_that_later_random_numbers_are_the_same(dropout: float) -> None:
    aten = torch.ops.aten
    wanted = CheckpointPolicy.PREFER_RECOMPUTE if dropout else CheckpointPolicy.MUST_SAVE
    q = k = v = torch.empty(0)
    assert _policy(None, aten._scaled_dot_product_flash_attention.default, q, k, v, dropout) == wanted
    assert _policy(None, aten._scaled_dot_product_flash_attention.default, q, k, v, dropout_p=dropout) == wanted
    assert _policy(None, aten._scaled_dot_product_efficient_attention.default, q, k, v, None, True, dropout) == wanted
    assert _policy(None, aten.mm.default, q, k) == CheckpointPolicy.MUST_SAVE
