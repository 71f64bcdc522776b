"""Split backward: compute the gradients of the inputs of a graph first and those of its weights later.

The first half runs only nodes on a path from the output to an input. If such a node also leads to weights, its incoming
gradient is stored. In the second half, the node runs again with this gradient, but only for its weights. The matrix
products of the first half are not repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pipeloom.runtime.model.sharding import storage_address

_PythonNode: type = torch._C._FunctionBase


def edge_of(tensor: Tensor) -> GradientEdge:
    """Return the gradient edge of a tensor. It keeps the graph also if a function of Python has made the tensor."""
    if isinstance(tensor.grad_fn, _PythonNode):
        with torch.enable_grad():
            tensor = tensor.view_as(tensor)
    return get_gradient_edge(tensor)


def run_backward(ends: Sequence[GradientEdge | Tensor], gradients: Sequence[Tensor]) -> None:
    """Run the whole backward from the ends of a graph and accumulate gradients into ``.grad`` of all leaves.

    Each end has a gradient of its shape. This does the same as `torch.autograd.backward` without its Python checks of
    each edge and gradient, which take as long as the engine for a small graph. The engine checks shapes itself.
    """
    if all(type(each) is Tensor for each in gradients):
        # Arguments: ends, gradients, do not retain, no graph of the backward, no inputs (all leaves).
        torch.autograd.Variable._execution_engine.run_backward(
            tuple(ends), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    else:
        torch.autograd.backward(ends, gradients)  # type: ignore[arg-type]


@dataclass(slots=True)
class _Junction:
    """A node that leads both to an input and to weights, and its incoming gradients."""

    node: Node
    weights: list[Tensor]
    towards_leaf: tuple[bool, ...]
    """Whether each child of the node leads to an input."""
    shared: bool = False
    """Whether it shares a weight with another junction."""
    gradients: tuple[Tensor | None, ...] = ()
    owner: Node | None = None
    """Keeps the node of a Python function; see `_owners`."""

    def catch(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Store the gradients that flow into the node."""
        self.gradients = gradients

    def weight_gradients(self) -> tuple[Tensor | None, ...]:
        """Run the node and the nodes between it and its weights, only for the weights."""
        edges = [(i, g) for i, g in enumerate(self.gradients) if g is not None]
        if not edges:
            return (None,) * len(self.weights)
        if self.shared:
            return self._shared_gradients()
        return torch.autograd.grad(
            tuple(GradientEdge(self.node, i) for i, _ in edges),
            self.weights,
            tuple(g for _, g in edges),
            # A node may be behind two junctions. The whole graph is freed afterwards.
            retain_graph=True,
            allow_unused=True,
        )

    def _shared_gradients(self) -> tuple[Tensor | None, ...]:
        """Run the node by itself, and then the nodes between it and its weights.

        The engine would go on towards the inputs, since a shared weight is behind them, too. It would run nodes of
        the first half again, which need not allow it.
        """
        ends, gradients = [], []
        for child, number, gradient in self._towards_weights():
            ends.append(GradientEdge(child, number))
            gradients.append(_as_taken(child, number, gradient))
        if not ends:
            return (None,) * len(self.weights)
        return torch.autograd.grad(ends, self.weights, gradients, retain_graph=True, allow_unused=True)

    def _towards_weights(self) -> Iterator[tuple[Node, int, Tensor]]:
        """Run the node, and yield its children that lead to no input, the index there, and the gradient."""
        node: Any = self.node
        is_python = isinstance(node, _PythonNode)
        found = node.apply(*self.gradients) if is_python else node(*self.gradients)
        gradients = found if isinstance(found, tuple) else (found,)
        if is_python:
            # It returns a gradient for every argument of the forward, of which some are no tensors.
            needed = iter([gradient for gradient, needs in zip(gradients, node.needs_input_grad, strict=True) if needs])
            gradients = tuple(None if child is None else next(needed) for child, _ in node.next_functions)
        for (child, number), leads, gradient in zip(node.next_functions, self.towards_leaf, gradients, strict=True):
            if child is not None and not leads and gradient is not None:
                yield child, number, gradient


def _as_taken(child: Node, number: int, gradient: Tensor) -> Tensor:
    """Return a gradient with the shape and type that a node takes, as the engine passes it."""
    taken: Any = child._input_metadata[number]
    if gradient.shape != taken.shape:
        # An operand that was broadcast.
        gradient = gradient.sum_to_size(taken.shape)
    return gradient.to(taken.dtype)


@dataclass(slots=True)
class DeferredWeights:
    """Weight gradients of one graph that are still to be computed."""

    junctions: list[_Junction] = field(default_factory=list)
    whole: tuple[Sequence[GradientEdge], Sequence[Tensor], list[Tensor]] | None = None
    """Ends of the graph that lead to no input, their gradients, and all weights behind them."""

    def accumulate(self) -> None:
        """Compute the weight gradients and add them to ``.grad``."""
        if self.whole is not None:
            ends, gradients, weights = self.whole
            if weights:
                # The junctions run nodes of this graph again.
                again = bool(self.junctions)
                weight_gradients = torch.autograd.grad(ends, weights, gradients, retain_graph=again, allow_unused=True)
                _accumulate(weights, weight_gradients, gradients)
        for junction in self.junctions:
            _accumulate(junction.weights, junction.weight_gradients(), junction.gradients)
        self.junctions, self.whole = [], None


def backward_inputs(
    ends: Sequence[GradientEdge], gradients: Sequence[Tensor], leaves: Sequence[Tensor]
) -> DeferredWeights:
    """Compute the gradients of the leaves into their ``.grad``, and defer those of the weights.

    ``ends`` are the ends of the graph with a gradient: its output, streams and losses. ``leaves`` are the inputs that
    need a gradient. If there are none, all work is deferred.
    """
    order, leads_to_leaf = _survey([end.node for end in ends], leaves)
    whole = None
    if without_leaf := [i for i, end in enumerate(ends) if end.node not in leads_to_leaf]:
        weights = order if len(without_leaf) == len(ends) else _survey([ends[i].node for i in without_leaf], leaves)[0]
        behind_them = [w for node in weights if (w := _variable(node)) is not None]
        whole = [ends[i] for i in without_leaf], [gradients[i] for i in without_leaf], behind_them
        if not leads_to_leaf:
            return DeferredWeights(whole=whole)
        ends, gradients = zip(
            *(x for i, x in enumerate(zip(ends, gradients, strict=True)) if i not in without_leaf), strict=True
        )
    junctions = [
        _Junction(node, behind, tuple(child in leads_to_leaf for child, _ in node.next_functions))
        for node in order
        if node in leads_to_leaf and (behind := _weights_behind(node, leads_to_leaf))
    ]
    if any(isinstance(junction.node, _PythonNode) for junction in junctions):
        owners = _owners(ends)
        for junction in junctions:
            junction.owner = owners.get(junction.node)
    uses = Counter(id(weight) for junction in junctions for weight in junction.weights)
    for junction in junctions:
        junction.shared = any(uses[id(weight)] > 1 for weight in junction.weights)
    hooks: list[Callable[[], None]] = [j.node.register_prehook(j.catch).remove for j in junctions]
    try:
        leaf_gradients = torch.autograd.grad(ends, leaves, gradients, retain_graph=True, allow_unused=True)
    finally:
        for remove in hooks:
            remove()
    for leaf, gradient in zip(leaves, leaf_gradients, strict=True):
        if gradient is not None:
            # Do not add in place, because autograd gives the summands of a sum the same gradient tensor.
            leaf.grad = gradient.detach() if leaf.grad is None else leaf.grad + gradient.detach()
    return DeferredWeights(junctions, whole)


def _survey(roots: Sequence[Node], leaves: Sequence[Tensor]) -> tuple[list[Node], set[Node]]:
    """Return all nodes, children first, and those that lead to a leaf."""
    accumulators = {id(leaf) for leaf in leaves}
    order: list[Node] = []
    leads_to_leaf: set[Node] = set()
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, expanded = stack.pop()
        if not expanded:
            if node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack += [(child, False) for child, _ in node.next_functions if child is not None]
            continue
        order.append(node)
        if id(_variable(node)) in accumulators or any(child in leads_to_leaf for child, _ in node.next_functions):
            leads_to_leaf.add(node)
    return order, leads_to_leaf


def _owners(ends: Sequence[GradientEdge]) -> dict[Node, Node | None]:
    """Return a node that owns each node of a Python function.

    Before PyTorch 2.13, a reference to such a node does not keep its part of the graph. A node above it in C++ does;
    `edge_of` puts one above all others.
    """
    owners: dict[Node, Node | None] = {}
    seen: set[Node] = set()
    stack = [end.node for end in ends]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        owner = owners.get(node) if isinstance(node, _PythonNode) else node
        for child, _ in node.next_functions:
            if child is not None:
                owners.setdefault(child, owner)
                stack.append(child)
    return owners


def _weights_behind(junction: Node, leads_to_leaf: set[Node]) -> list[Tensor]:
    """Return the weights that a junction reaches through nodes that lead to no leaf, each once."""
    unique: dict[int, Tensor] = {}
    seen: set[Node] = set()
    stack = [child for child, _ in junction.next_functions if child is not None and child not in leads_to_leaf]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if (weight := _variable(node)) is not None:
            unique[id(weight)] = weight
        stack += [child for child, _ in node.next_functions if child is not None]
    return list(unique.values())


def _variable(node: Node) -> Tensor | None:
    """Return the leaf tensor of a gradient-accumulating node, or None for any other node."""
    variable = getattr(node, "variable", None)
    return variable if isinstance(variable, Tensor) else None


def _accumulate(
    weights: Sequence[Tensor], gradients: Sequence[Tensor | None], arrived: Sequence[Tensor | None]
) -> None:
    """Add gradients to ``.grad``. Each weight gets its own tensor, because autograd gives summands the same tensor."""
    others: set[int] | None = None
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is None:
                continue
            if weight.grad is not None:
                weight.grad += gradient
                continue
            if others is None:
                others = {storage_address(each) for each in arrived if each is not None}
            address = storage_address(gradient)
            weight.grad = gradient.detach().clone() if address in others else gradient.detach()
            others.add(address)
