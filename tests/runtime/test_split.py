from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeloom.runtime.execute.split import backward_inputs, edge_of


class CountProducts(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._opname in ("mm", "addmm", "bmm"):
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(torch.softmax(q @ k.T, dim=-1) @ v) + self.bias


class TwiceInARow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


class Gated(nn.Module):
    """A weight that passes through other operations before it meets the input, and one that never does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.idle = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.a * self.b) + self.a.exp()


class Product(torch.autograd.Function):
    """A product, with an argument that is no tensor."""

    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return factor * x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return None, ctx.factor * gradient @ weight.T, ctx.factor * x.T @ gradient


class Mutating(torch.autograd.Function):
    """Its backward changes what its forward saved, so that it runs only once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = torch.exp(x)
        ctx.save_for_backward(result)
        return result.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (result,) = ctx.saved_tensors
        return result.mul_(gradient)


class TwiceAroundAnother(nn.Module):
    """A weight that is used before and behind a function whose backward runs only once, by functions of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.randn(8, 8) * 0.1), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = Product.apply(0.5, x, self.weight.sin())
        x = torch.addmm(self.other.bias, Mutating.apply(x), self.weight)
        return self.other(Product.apply(2.0, x, self.weight))


class EndsInAFunction(nn.Module):
    """No junction is above the function of Python, so that nothing else keeps its node."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(2.0, x, self.weight).sin()


class EndsWithAFunction(EndsInAFunction):
    """The function is the root of the graph."""

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(2.0, x, self.weight)


def gradients(model: nn.Module, x: Tensor, split: bool) -> tuple[list[Tensor | None], Tensor | None, Counter[str]]:
    leaf = x.detach().requires_grad_()
    model.zero_grad(set_to_none=True)
    output = model(leaf)
    gradient = torch.cos(torch.arange(output.numel(), dtype=output.dtype)).view_as(output)
    with CountProducts() as products:
        if split:
            deferred = backward_inputs([edge_of(output)], [gradient], [leaf])
            assert all(p.grad is None for p in model.parameters())
            assert leaf.grad is not None
            del output
            deferred.accumulate()
        else:
            torch.autograd.backward(output, gradient)
    return [p.grad for p in model.parameters()], leaf.grad, products.counts


@pytest.mark.parametrize(
    ("layers", "repeats_nothing"),
    [
        ([Attention], True),
        ([Attention, Gated, Attention], True),
        ([nn.Identity, Gated], True),
        # A weight used twice costs one more product at each use.
        ([Attention, TwiceInARow], False),
        ([TwiceInARow, Gated, TwiceInARow], False),
        ([TwiceAroundAnother, Attention, TwiceAroundAnother], False),
        # A function of Python computes all of its gradients each time.
        ([Attention, EndsInAFunction], False),
        ([Attention, EndsWithAFunction], False),
    ],
)
def test_both_halves_together_are_the_whole(layers: list[type[nn.Module]], repeats_nothing: bool) -> None:
    torch.manual_seed(len(layers))
    model = nn.Sequential(*(layer() for layer in layers)).double()
    x = torch.randn(6, 8, dtype=torch.float64)
    whole, whole_input, products = gradients(model, x, split=False)
    halves, halves_input, split_products = gradients(model, x, split=True)
    torch.testing.assert_close(halves_input, whole_input, rtol=1e-12, atol=1e-12)
    for mine, wanted in zip(halves, whole, strict=True):
        assert (mine is None) == (wanted is None)
        if mine is not None:
            torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)
    if repeats_nothing:
        assert split_products == products


def test_without_inputs_all_work_is_deferred() -> None:
    model = Attention()
    output = model(torch.randn(4, 8))
    deferred = backward_inputs([edge_of(output)], [torch.ones_like(output)], [])
    assert all(p.grad is None for p in model.parameters())
    deferred.accumulate()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("leaf_needs_gradient", [True, False])
def test_weights_that_are_added_keep_gradients_of_their_own(leaf_needs_gradient: bool) -> None:
    one, other = (nn.Parameter(torch.randn(4, 4, dtype=torch.float64)) for _ in range(2))
    added = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    wanted = [torch.zeros_like(weight) for weight in (one, other, added)]
    for _ in range(3):
        x = torch.randn(3, 4, dtype=torch.float64).requires_grad_(leaf_needs_gradient)
        gradient = torch.randn(3, 4, dtype=torch.float64)
        before = gradient.clone()
        output = x @ (one + other) + added
        for total, each in zip(wanted, torch.autograd.grad(output, (one, other, added), gradient), strict=True):
            total += each
        ends = [edge_of(x @ (one + other) + added)]
        backward_inputs(ends, [gradient], [x] if leaf_needs_gradient else []).accumulate()
        assert torch.equal(gradient, before)
    for weight, total in zip((one, other, added), wanted, strict=True):
        torch.testing.assert_close(weight.grad, total)


class TwoEnds(nn.Module):
    """Three outputs: of the input and weights, of weights alone, and the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.start, self.scale = nn.Linear(4, 4), nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        apart = torch.tanh(self.scale(self.start))
        return self.inner(x) * apart, apart, x


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1), (0, 1, 2), (2, 2), (0, 1, 1)])
def test_a_graph_may_have_several_ends(which: tuple[int, ...]) -> None:
    model = TwoEnds().double()
    x = torch.randn(3, 4, dtype=torch.float64).requires_grad_()
    gradients = [torch.randn(3, 4, dtype=torch.float64) for _ in which]
    outputs = model(x)
    torch.autograd.backward([outputs[i] for i in which], gradients)
    wanted = [p.grad for p in (x, *model.parameters())]
    for p in (x, *model.parameters()):
        p.grad = None
    outputs = model(x)
    deferred = backward_inputs([edge_of(outputs[i]) for i in which], gradients, [x])
    given = x.grad
    assert all(p.grad is None for p in model.parameters())
    deferred.accumulate()
    assert x.grad is given
    for p, want in zip((x, *model.parameters()), wanted, strict=True):
        if want is None:
            assert p.grad is None or not p.grad.any()
        else:
            torch.testing.assert_close(p.grad, want)
