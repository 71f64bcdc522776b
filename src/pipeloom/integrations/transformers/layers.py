"""Layers of language models: the library's blocks with their arguments, and the parts before and after them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.integrations.transformers.hollow import Arguments, BlockReached, HollowRun, Probe, outputs_of, run_with
from pipeloom.integrations.transformers.packed import Calls, Mask


class LibraryLayer(nn.Module):
    """A layer that knows the library's names of its parameters."""

    def library_name(self, parameter: str) -> str:
        """Return the library's name of a parameter of this layer."""
        raise NotImplementedError


class Block(LibraryLayer):
    """A block of the library, called with the arguments that the library's own forward pass gives it."""

    def __init__(self, inner: nn.Module, place: int, path: str) -> None:
        super().__init__()
        self.inner = inner
        self.place, self.path = place, path

    def library_name(self, parameter: str) -> str:
        """As `LibraryLayer`."""
        return f"{self.path}.{parameter.removeprefix('inner.')}"

    def forward(self, x: Tensor, *, calls: Calls, **tensors: Tensor) -> Tensor:
        """Map the hidden state of packed sequences, which has no batch dimension."""
        args, kwargs = calls.block(self.place, tensors)
        out: Tensor = outputs_of(self.inner(x[None], *args, **kwargs))[0]
        return out[0]


class _Shell(LibraryLayer):
    """A hollow model with the parts that run before or after the blocks."""

    shell: Any

    def __init__(self, shell: nn.Module) -> None:
        super().__init__()
        self.shell = shell

    def library_name(self, parameter: str) -> str:
        """As `LibraryLayer`."""
        return parameter.removeprefix("shell.")


def stop(probe: Probe, state: Tensor, arguments: Arguments) -> Tensor:
    """Leave the forward pass at the first block."""
    del probe, arguments
    raise BlockReached(state)


class TextFirst(_Shell):
    """The part before the blocks of a language model."""

    def forward(self, ids: Tensor, *, calls: Calls, **tensors: Tensor) -> Tensor:
        """Embed the ids of packed sequences."""
        given = {name: value for name, value in calls.forward(tensors).items() if name not in ("lengths", "targets")}
        try:
            with run_with(HollowRun(stop)):
                self.shell(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], use_cache=False, **given)
        except BlockReached as reached:
            return reached.state[0]
        raise AssertionError("the library's forward pass never reached a block")


class TextLast(_Shell):
    """The part after the blocks of a language model: norm and head."""

    def __init__(self, shell: nn.Module, takes: tuple[str, ...], width: int) -> None:
        super().__init__(shell)
        self.takes, self.width = takes, width

    def forward(self, x: Tensor, *, calls: Calls, **tensors: Tensor) -> Tensor:
        """Return the logits of packed sequences."""
        state = x[None]
        given = {name: value for name, value in calls.forward(tensors).items() if name in self.takes}
        ones = torch.ones(state.shape[:2], dtype=torch.int64, device=x.device)
        embeddings = x.new_zeros(*state.shape[:2], self.width)
        with run_with(HollowRun(lambda *_: state)):
            out = self.shell(inputs_embeds=embeddings, attention_mask=ones, use_cache=False, **given)
        logits: Tensor = out.logits[0]
        return logits


def record(shell: nn.Module, call: Any, num_blocks: int, lengths: tuple[int, ...]) -> list[Arguments]:
    """Return the arguments with which the library's forward pass calls its blocks, without running the blocks."""
    found: list[Arguments] = []

    def play(probe: Probe, state: Tensor, arguments: Arguments) -> Tensor:
        assert probe.place == len(found), "blocks run in another order"
        found.append(arguments)
        if len(found) == num_blocks:
            raise BlockReached(state)
        return state

    try:
        with torch.no_grad(), run_with(HollowRun(play, lengths)):
            call(shell)
    except BlockReached:
        return found
    raise AssertionError("the library's forward pass never reached its last block")


def has_mask(arguments: Arguments | None) -> bool:
    """Return whether the arguments of a block contain the mask of packed sequences. A block left out has none."""
    args, kwargs = arguments or ((), {})
    return any(isinstance(each, Mask) for each in (*args, *kwargs.values()))
