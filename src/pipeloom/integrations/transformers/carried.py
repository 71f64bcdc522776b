"""Find what blocks pass on to later blocks beside their state, such as keys and values that several of them share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.integrations.transformers.description import CarriedTensor
from pipeloom.integrations.transformers.hollow import Arguments, outputs_of, state_name
from pipeloom.integrations.transformers.smaller import signature
from pipeloom.integrations.transformers.whole import Where, tensors_in

_STATE = (0, 0)
"""Where the outputs and arguments of a block have its new state."""


def find_carried(model: nn.Module, path: str, call: Callable[[], object], tokens: int) -> tuple[CarriedTensor, ...]:
    """Return the tensors that blocks take from earlier blocks beside the state.

    ``call`` runs the model with gradients on a sample of ``tokens`` tokens. Raise `InputError` if a tensor has no
    dimension of tokens.
    """
    blocks: Any = model.get_submodule(path)
    found = _Passing(tokens)
    hooks = [each.register_forward_pre_hook(found.enter, with_kwargs=True) for each in blocks]
    hooks += [each.register_forward_hook(partial(found.leave, signature(each)), with_kwargs=True) for each in blocks]
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    return found.carried()


class _Passing:
    """The tensors that blocks compute and that later blocks take, while a model runs."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.computed: dict[int, tuple[Where, Tensor]] = {}
        """By identity of the tensor: where the block that computed it had it after its call."""
        self.givers: dict[Where, set[Any]] = {}
        self.taken: dict[Where, dict[Any, Where]] = {}
        self.entered: list[tuple[Where, Tensor]] = []
        """The tensors in the arguments of the block that runs."""

    def enter(self, block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cut the history of the state. Gradients then show what a block takes from earlier ones in other ways."""
        name = state_name(block)
        if args:
            args = (args[0].detach().clone(), *args[1:])
        else:
            kwargs = {**kwargs, name: kwargs[name].detach().clone()}
        self.entered = list(tensors_in(_beside_state(args, kwargs, name)))
        return args, kwargs

    def leave(self, kind: Any, block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note what a block has taken and computed."""
        outputs = outputs_of(output)
        before = {id(tensor) for _, tensor in self.entered}
        after = tensors_in((outputs, *_beside_state(args, kwargs, state_name(block))))
        new = [(where, tensor) for where, tensor in after if id(tensor) not in before and where != _STATE]
        ends = [tensor.sum() for tensor in (outputs[0], *(each for _, each in new)) if tensor.requires_grad]
        known = [each for each in self.entered if id(each[1]) in self.computed and each[1].requires_grad]
        leaves = [tensor for _, tensor in known]
        grads = torch.autograd.grad(ends, leaves, allow_unused=True, retain_graph=True) if known else ()
        for (where, tensor), grad in zip(known, grads, strict=True):
            if grad is not None:
                self.taken.setdefault(self.computed[id(tensor)][0], {})[kind] = where
        for where, tensor in new:
            self.computed[id(tensor)] = where, tensor
            self.givers.setdefault(where, set()).add(kind)

    def carried(self) -> tuple[CarriedTensor, ...]:
        """Return the tensors that some block took."""
        shapes = {where: tensor.shape for where, tensor in self.computed.values()}
        found = []
        for where, takers in self.taken.items():
            axis = next((axis for axis, side in enumerate(shapes[where]) if side == self.tokens), None)
            if axis is None:
                raise InputError("model", "has blocks that take tensors without tokens from earlier ones")
            found.append(CarriedTensor(axis, where, frozenset(self.givers[where]), takers))
        return tuple(found)


def _beside_state(args: Any, kwargs: Any, name: str) -> Arguments:
    """Return the arguments of a block besides its state."""
    return (tuple(args[1:]), kwargs) if args else ((), {key: each for key, each in kwargs.items() if key != name})
