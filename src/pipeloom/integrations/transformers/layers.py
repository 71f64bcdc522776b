"""The layers that the engine runs: a library's block with its arguments, and what is before and behind the blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.integrations.transformers.hollow import Arguments, Reached, Running, run_with
from pipeloom.integrations.transformers.packed import Calls, Mask


class LibraryLayer(nn.Module):
    """A layer that knows under which names the library has its parameters."""

    def library_name(self, parameter: str) -> str:
        """Return the library's name of a parameter of this layer."""
        raise NotImplementedError


class Block(LibraryLayer):
    """A block of the library, called as its own forward calls it."""

    def __init__(self, inner: nn.Module, place: int, path: str, *, packs: bool, alone: bool) -> None:
        super().__init__()
        self.inner = inner
        self.place, self.path, self.packs, self.alone = place, path, packs, alone

    def library_name(self, parameter: str) -> str:
        """As `LibraryLayer`."""
        return f"{self.path}.{parameter.removeprefix('inner.')}"

    def forward(self, x: Tensor, *, calls: Calls, **tensors: Tensor) -> Tensor:
        """Take and give the state, of packed sequences without the library's dimension of batches."""
        arguments = calls.block(self.place, tensors)
        if not self.packs:
            return self._call(x, arguments)
        if not self.alone:
            return self._call(x[None], arguments)[0]
        lengths = calls.outer["lengths"]
        return torch.cat([self._call(each[None], arguments)[0] for each in torch.split(x, lengths)])

    def _call(self, x: Tensor, arguments: Arguments) -> Tensor:
        args, kwargs = arguments
        output = self.inner(x, *args, **kwargs)
        out: Tensor = output[0] if isinstance(output, tuple) else output
        return out


class _Shell(LibraryLayer):
    """A part of the library's model that its own forward reaches before or behind the blocks."""

    shell: Any

    def __init__(self, shell: nn.Module) -> None:
        super().__init__()
        self.shell = shell

    def library_name(self, parameter: str) -> str:
        """As `LibraryLayer`."""
        return parameter.removeprefix("shell.")


def stop(place: int, state: Tensor, arguments: Arguments) -> Tensor:
    """Leave the forward at the first block."""
    del place, arguments
    raise Reached(state)


class TextFirst(_Shell):
    """What stands before the blocks of the language model: the embedding, and images put in their places."""

    def __init__(self, shell: nn.Module, *, listed: bool) -> None:
        super().__init__(shell)
        self.listed = listed

    def forward(self, ids: Tensor, images: Tensor | None = None, *, calls: Calls, **tensors: Tensor) -> Tensor:
        """Take the ids of packed sequences, and the features of their images."""
        given = calls.forward(tensors)
        given.pop("lengths")
        if images is not None:
            given["mm_encoder_outputs"] = {"image": self._features(images)}
        try:
            with run_with(Running(stop)):
                self.shell(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], use_cache=False, **given)
        except Reached as reached:
            # Where there are no images, the sum of nothing: whoever gave them gets a gradient all the same.
            return reached.state[0] if images is None else reached.state[0] + images.sum() * 0
        raise AssertionError("the library's forward never came to a block")

    def _features(self, images: Tensor) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        width = self.shell.config.get_text_config().hidden_size
        rows = images.reshape(-1, width)
        return BaseModelOutputWithPooling(pooler_output=[rows] if self.listed else rows[None])


class TextLast(_Shell):
    """What stands behind the blocks of the language model: norm and head."""

    def forward(self, x: Tensor, *, calls: Calls, **tensors: Tensor) -> Tensor:
        """Give logits of packed sequences."""
        state, given = x[None], calls.forward(tensors)
        given.pop("lengths")
        ones = torch.ones(state.shape[:2], dtype=torch.int64, device=x.device)
        with run_with(Running(lambda *_: state, state.detach())):
            out = self.shell(inputs_embeds=state.detach(), attention_mask=ones, use_cache=False, **given)
        logits: Tensor = out.logits[0]
        return logits


class VisionFirst(_Shell):
    """What stands before the blocks of an encoder."""

    def __init__(self, shell: nn.Module, *, packs: bool) -> None:
        super().__init__(shell)
        self.packs = packs

    def forward(self, pixels: Tensor, *, calls: Calls, **tensors: Tensor) -> Tensor:
        """Take the pixels as the library's processor gives them."""
        given = calls.forward(tensors)
        given.pop("shape")
        try:
            with run_with(Running(stop)):
                self.shell.get_image_features(pixels, **given)
        except Reached as reached:
            return reached.state[0] if self.packs else reached.state
        raise AssertionError("the library's forward never came to a block")


class VisionLast(_Shell):
    """What stands behind the blocks of an encoder: norm, merger or projector."""

    def __init__(self, shell: nn.Module, *, packs: bool, rows: tuple[int, ...]) -> None:
        super().__init__(shell)
        self.packs, self.rows = packs, rows

    def forward(self, x: Tensor, *, calls: Calls, **tensors: Tensor) -> Tensor:
        """Give the features, reshaped to as many rows as the module states."""
        state, given = x[None] if self.packs else x, calls.forward(tensors)
        # Of the pixels only the shape is looked at: what would embed them is filled in.
        pixels = x.new_zeros(()).expand(given.pop("shape"))
        with run_with(Running(lambda *_: state, state.detach())):
            features = self.shell.get_image_features(pixels, **given).pooler_output
        if isinstance(features, (tuple, list)):
            features = torch.cat(tuple(features))
        out: Tensor = features.reshape(-1, *self.rows)
        return out


def record(
    shell: nn.Module, call: Any, num_blocks: int, filling: Tensor, lengths: tuple[int, ...] | None
) -> list[Arguments]:
    """Return what the library's forward calls its blocks with; nothing is computed that a block would compute."""
    found: list[Arguments] = []

    def play(place: int, state: Tensor, arguments: Arguments) -> Tensor:
        assert place == len(found), "blocks run in another order"
        found.append(arguments)
        if len(found) == num_blocks:
            raise Reached(state)
        return state

    try:
        with torch.no_grad(), run_with(Running(play, filling, lengths)):
            call(shell)
    except Reached:
        return found
    raise AssertionError("the library's forward never came to its last block")


def has_mask(arguments: Arguments) -> bool:
    """Whether a block was given the mask of packed sequences."""
    args, kwargs = arguments
    return any(isinstance(each, Mask) for each in (*args, *kwargs.values()))
